#include "layer/layer_case.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "support/metrics.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

template <class T>
T must(Result<T> result, std::string_view what) {
  if (!result.ok()) {
    fmt::print(stderr, "{}: {}\n", what, result.status().to_string());
    std::abort();
  }
  return std::move(result).value();
}

Tensor copy_of(const Tensor& t) {
  if (!t.present()) return {};
  Tensor c = must(Tensor::uninitialized(t.dtype(), t.shape()), "copy");
  std::memcpy(c.data(), t.data(), static_cast<std::size_t>(t.bytes()));
  return c;
}

MoeProblem problem_of(const MoeLayerSpec& spec, bool shared) {
  MoeProblem p;
  p.num_experts = p.num_local_experts = shared ? 1 : spec.num_experts;
  p.top_k = shared ? 1 : spec.routing.top_k;
  p.hidden_size = spec.hidden_size;
  p.intermediate_size = shared ? spec.shared.intermediate_size : spec.intermediate_size;
  p.activation = shared ? spec.shared.activation.value_or(spec.activation) : spec.activation;
  p.quant = spec.quant;
  p.activation_dtype = spec.activation_dtype;
  p.has_expert_bias = !shared && spec.has_expert_bias;
  p.apply_router_weight_on_input = !shared && spec.apply_router_weight_on_input;
  return p;
}

}  // namespace

MoeLayerWeights LayerTensors::weights() const {
  MoeLayerWeights w;
  w.spec = spec;
  w.tensors.gate_weight = copy_of(gate_weight);
  w.tensors.gate_bias = copy_of(gate_bias);
  w.tensors.e_score_correction_bias = copy_of(correction_bias);
  w.tensors.shared_gate_weight = copy_of(shared_gate_weight);
  w.tensors.experts_norm_weight = copy_of(experts_norm_weight);
  w.tensors.expert_scale = copy_of(expert_scale);
  w.tensors.hash_table = copy_of(hash_table);
  w.experts = make_stacked_source(experts.view());
  if (spec.shared.intermediate_size > 0) w.shared = make_stacked_source(shared.view());
  w.shared_quant = spec.quant;
  return w;
}

LayerTensors make_tensors(std::uint64_t seed, const MoeLayerSpec& spec) {
  LayerTensors t;
  t.spec = spec;
  Rng rng(seed);
  const std::int64_t columns = spec.num_experts + spec.routing.num_zero_experts;
  // Logits with a standard deviation of 2: clear winners and near misses.
  t.gate_weight = random_normal(rng, DType::kBF16, {columns, spec.hidden_size},
                                2.0 / std::sqrt(static_cast<double>(spec.hidden_size)));
  if (spec.has_router_bias) t.gate_bias = random_normal(rng, DType::kBF16, {columns});
  if (spec.routing.has_correction_bias) {
    t.correction_bias = random_normal(rng, DType::kF32, {columns}, 0.1);
  }
  if (spec.routing.has_expert_scale) {
    t.expert_scale = random_normal(rng, DType::kF32, {spec.num_experts});
  }
  if (spec.routing.method == RoutingMethod::kHash) {
    t.hash_table =
        must(Tensor::zeros(DType::kI32, {spec.hash_vocabulary, spec.routing.top_k}), "hash_table");
    for (std::int64_t i = 0; i < t.hash_table.bytes() / 4; ++i) {
      t.hash_table.as<std::int32_t>()[i] =
          static_cast<std::int32_t>((i * 5 + i / spec.routing.top_k) % spec.num_experts);
    }
  }
  if (spec.input_norm_eps > 0) {
    t.experts_norm_weight = random_normal(rng, DType::kF32, {spec.hidden_size});
  }
  t.experts = random_expert_weights(seed + 1, problem_of(spec, false));
  if (spec.shared.intermediate_size > 0) {
    t.shared = random_expert_weights(seed + 2, problem_of(spec, true));
  }
  if (spec.shared.gated_output) {
    t.shared_gate_weight = random_normal(rng, DType::kBF16, {1, spec.hidden_size}, 0.2);
  }
  return t;
}

FusedMoE make_layer(const LayerTensors& tensors, const FusedMoE::Options& options) {
  return must(FusedMoE::create(tensors.weights(), options), "make_layer");
}

LayerTensors model_in(DType dtype, std::string_view quant, MoeLayerSpec spec) {
  spec.hidden_size = 256;
  spec.intermediate_size = 128;
  if (spec.shared.intermediate_size > 0) spec.shared.intermediate_size = 128;
  spec.quant = quant_scheme_from_name(quant).value();
  spec.activation_dtype = dtype;
  return make_tensors(5, spec);
}

Tensor random_hidden(std::uint64_t seed, std::int64_t tokens, std::int64_t hidden, DType dtype) {
  Rng rng(seed);
  return random_normal(rng, dtype, {tokens, hidden});
}

Result<LayerRun> run_args(const FusedMoE& layer, FusedMoE::Args args, DType output_dtype) {
  const std::int64_t hidden = layer.spec().hidden_size;
  const Shape& x = args.hidden_states.shape;
  const std::int64_t tokens = x.rank() == 3 ? x[0] * x[1] : x[0];
  const RoutingSpec& routing = layer.spec().routing;
  LayerRun run;
  run.output = must(Tensor::uninitialized(output_dtype, {tokens, hidden}), "output");
  run.logits = must(
      Tensor::zeros(DType::kF32, {tokens, routing.num_experts + routing.num_zero_experts}), "");
  run.topk_weights = must(Tensor::zeros(DType::kF32, {tokens, routing.top_k}), "");
  run.topk_ids = must(Tensor::zeros(DType::kI32, {tokens, routing.top_k}), "");
  for (Tensor* t : {&run.output, &run.logits, &run.topk_weights, &run.topk_ids}) {
    poison(t->view());
  }
  args.output = run.output.view();
  if (!args.topk_ids.present()) args.trace.router_logits = run.logits.view();
  args.trace.topk_weights = run.topk_weights.view();
  args.trace.topk_ids = run.topk_ids.view();
  MOESAIC_RETURN_IF_ERROR(layer.forward(args));
  return run;
}

LayerRun must_run(const FusedMoE& layer, const FusedMoE::Args& args, DType output_dtype) {
  return must(run_args(layer, args, output_dtype), "must_run");
}

LayerRun run_layer(const FusedMoE& layer, const Tensor& hidden_states, DType output_dtype) {
  FusedMoE::Args args;
  args.hidden_states = hidden_states.view();
  return must_run(layer, args, output_dtype);
}

std::vector<double> layer_oracle(const LayerTensors& t, const Tensor& hidden_states,
                                 const LayerRun& run, double output_scale) {
  std::vector<double> sum =
      oracle_moe(problem_of(t.spec, false), t.experts.view(), hidden_states.view(),
                 run.topk_ids.view(), run.topk_weights.view(), {});
  for (double& v : sum) v *= output_scale;
  if (t.spec.shared.intermediate_size == 0) return sum;
  const std::vector<double> x = to_doubles(hidden_states.view());
  const auto hidden = static_cast<std::size_t>(t.spec.hidden_size);
  const MoeProblem problem = problem_of(t.spec, true);
  const std::vector<double> gate = t.shared_gate_weight.present()
                                       ? to_doubles(t.shared_gate_weight.view())
                                       : std::vector<double>();
  for (std::size_t row = 0; row * hidden < x.size(); ++row) {
    const std::span<const double> xs(x.data() + row * hidden, hidden);
    const std::vector<double> y = oracle_expert(problem, t.shared.view(), 0, xs, 1.0, {});
    double factor = 1.0;
    if (!gate.empty()) {
      double logit = 0;
      for (std::size_t h = 0; h < hidden; ++h) logit += xs[h] * gate[h];
      factor = 1.0 / (1.0 + std::exp(-logit));
    }
    for (std::size_t h = 0; h < hidden; ++h) sum[row * hidden + h] += factor * y[h];
  }
  return sum;
}

OwnedExpertWeights collect(ExpertSource& source, std::int64_t experts) {
  OwnedExpertWeights all;
  for (std::int64_t e = 0; e < experts; ++e) {
    const ExpertWeightsView v = must(source.expert(e), "collect");
    const auto append = [&](Tensor& to, const ConstTensorView& from) {
      if (!from.present()) return;
      if (e == 0) {
        std::vector<std::int64_t> dims(from.shape.dims().begin(), from.shape.dims().end());
        dims.insert(dims.begin(), experts);
        to = must(Tensor::zeros(from.dtype, must(Shape::from(dims), "")), "");
      }
      const std::int64_t bytes = to.bytes() / experts;
      std::memcpy(to.data() + e * bytes, from.data, static_cast<std::size_t>(bytes));
    };
    append(all.w13, v.w13);
    append(all.w13_scale, v.w13_scale);
    append(all.w13_bias, v.w13_bias);
    append(all.w2, v.w2);
    append(all.w2_scale, v.w2_scale);
    append(all.w2_bias, v.w2_bias);
  }
  return all;
}

}  // namespace moesaic::test
