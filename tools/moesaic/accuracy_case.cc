#include "accuracy_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "bench_random.h"
#include "experts/reference/operand.h"
#include "golden.h"
#include "layer_io.h"
#include "numerics/codec.h"
#include "quant/quantize_weight.h"

namespace moesaic::tool {
namespace {

// Sum of squared differences and of squares.
struct Sums {
  double error = 0, size = 0;
  void add(double got, double want) {
    error += (got - want) * (got - want);
    size += want * want;
  }
  double relative() const { return size > 0 ? std::sqrt(error / size) : 0.0; }
};

struct StoredExpert {
  quant::QuantizedMatrix w13, w2;
  Tensor w13_input_scale, w2_input_scale;
};

class StoredSource final : public ExpertSource {
 public:
  StoredSource(const std::vector<StoredExpert>& experts, bool with_input_scales)
      : experts_(experts), with_input_scales_(with_input_scales) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    const StoredExpert& s = experts_[static_cast<std::size_t>(e)];
    const quant::StoredMatrix a = s.w13.view();
    const quant::StoredMatrix b = s.w2.view();
    ExpertWeightsView v;
    v.w13 = a.weight;
    v.w13_scale = a.scale;
    v.w13_global_scale = a.global_scale;
    v.w13_channel_scale = a.channel_scale;
    v.w2 = b.weight;
    v.w2_scale = b.scale;
    v.w2_global_scale = b.global_scale;
    v.w2_channel_scale = b.channel_scale;
    if (with_input_scales_) {
      v.w13_input_scale = s.w13_input_scale.view();
      v.w2_input_scale = s.w2_input_scale.view();
    }
    return v;
  }

 private:
  const std::vector<StoredExpert>& experts_;
  bool with_input_scales_;
};

MoeProblem accuracy_problem(const AccuracyCase& data, const Scheme& scheme, int num_threads) {
  MoeProblem p;
  p.num_experts = p.num_local_experts = data.num_experts;
  p.top_k = data.top_k;
  p.hidden_size = data.hidden_size;
  p.intermediate_size = data.intermediate_size;
  p.quant = scheme;
  const DType activation = scheme.activation.dtype;
  p.activation_dtype =
      activation == DType::kF16 || activation == DType::kF32 ? activation : DType::kBF16;
  p.max_tokens = data.hidden_states.shape()[0];
  p.num_threads = num_threads;
  return p;
}

// The routed experts' output, weighted and added up.
Result<std::vector<double>> run_experts(const AccuracyCase& data, const MoeProblem& problem,
                                        const Tensor& rows, ExpertSource& source,
                                        std::string* backend,
                                        std::span<RowNumerics> numerics = {}) {
  MOESAIC_ASSIGN_OR_RETURN(const ExpertsBackend* row, choose_experts(problem));
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<Experts> experts, row->create(problem, source));
  *backend = std::string(experts->name());
  const std::int64_t tokens = data.hidden_states.shape()[0];
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, experts->workspace_size(tokens));
  MOESAIC_ASSIGN_OR_RETURN(Tensor workspace, Tensor::uninitialized(DType::kU8, {bytes}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor output, Tensor::zeros(DType::kF32, data.hidden_states.shape()));
  ExpertsArgs args;
  args.hidden_states = rows.view();
  args.topk_ids = data.topk_ids.view();
  args.topk_weights = data.topk_weights.view();
  args.workspace = {workspace.data(), static_cast<std::size_t>(bytes)};
  args.output = output.view();
  args.numerics = numerics;
  MOESAIC_RETURN_IF_ERROR(experts->run(args));
  return to_doubles(output.view());
}

// Largest magnitude of what GEMM2 reads, over the first rows: the calibration of static scales.
float intermediate_amax(const AccuracyCase& data) {
  const std::int64_t h = data.hidden_size;
  const std::int64_t i_size = data.intermediate_size;
  float amax = 0.0F;
  const std::int64_t rows = std::min<std::int64_t>(data.hidden_states.shape()[0], 32);
  for (std::int64_t m = 0; m < rows; ++m) {
    const std::int64_t expert = data.topk_ids.as<std::int32_t>()[m * data.top_k];
    if (expert < 0) continue;
    const float* w = data.w13[static_cast<std::size_t>(expert)].as<float>();
    for (std::int64_t i = 0; i < i_size; ++i) {
      float gate = 0.0F;
      float up = 0.0F;
      for (std::int64_t k = 0; k < h; ++k) {
        const float x = f32_from_bf16(data.hidden_states.as<std::uint16_t>()[m * h + k]);
        gate += x * w[i * h + k];
        up += x * w[(i_size + i) * h + k];
      }
      amax = std::max(amax, std::abs(gate / (1.0F + std::exp(-gate)) * up));
    }
  }
  return amax;
}

float input_amax(const AccuracyCase& data) {
  float amax = 0.0F;
  for (const double x : to_doubles(data.hidden_states.view())) {
    amax = std::max(amax, static_cast<float>(std::abs(x)));
  }
  return amax;
}

// Quantises all experts; *error gets the weights' relative error.
//   static_top  what a static activation scale of 1 can express
Result<std::vector<StoredExpert>> store(const AccuracyCase& data, const OperandQuant& quant,
                                        double* error, float static_top = 2688.0F) {
  // NVFP4's two levels reach 6 * 448; one scale for all, 448.
  const float scale13 = input_amax(data) / static_top;
  const float scale2 = intermediate_amax(data) / static_top;
  std::vector<StoredExpert> stored(data.w13.size());
  Sums sums;
  for (std::size_t e = 0; e < stored.size(); ++e) {
    const std::array<const Tensor*, 2> from = {&data.w13[e], &data.w2[e]};
    const std::array<quant::QuantizedMatrix*, 2> to = {&stored[e].w13, &stored[e].w2};
    for (std::size_t i = 0; i < 2; ++i) {
      const std::int64_t part = i == 0 ? data.intermediate_size : data.hidden_size;
      MOESAIC_ASSIGN_OR_RETURN(*to[i], quant::quantize_weight(quant, from[i]->view(), part));
      MOESAIC_ASSIGN_OR_RETURN(Tensor back, Tensor::zeros(DType::kF32, from[i]->shape()));
      MOESAIC_RETURN_IF_ERROR(quant::dequantize_weight(quant, to[i]->view(), part, back.view()));
      for (std::int64_t j = 0; j < back.bytes() / 4; ++j) {
        sums.add(static_cast<double>(back.as<float>()[j]),
                 static_cast<double>(from[i]->as<float>()[j]));
      }
    }
    MOESAIC_ASSIGN_OR_RETURN(stored[e].w13_input_scale, Tensor::zeros(DType::kF32, {1}));
    MOESAIC_ASSIGN_OR_RETURN(stored[e].w2_input_scale, Tensor::zeros(DType::kF32, {1}));
    *stored[e].w13_input_scale.as<float>() = scale13;
    *stored[e].w2_input_scale.as<float>() = scale2;
  }
  *error = sums.relative();
  return stored;
}

double activation_error(const AccuracyCase& data, const OperandQuant& quant) {
  const std::int64_t h = data.hidden_size;
  const std::vector<double> rows = to_doubles(data.hidden_states.view());
  std::vector<float> row(static_cast<std::size_t>(h));
  std::vector<float> scales(static_cast<std::size_t>(experts::ref_max_scales(quant, h)));
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(h));
  const float input_scale = input_amax(data) / 2688.0F;
  Sums sums;
  for (std::size_t m = 0; m < rows.size() / row.size(); ++m) {
    const double* x = rows.data() + m * row.size();
    std::transform(x, x + h, row.begin(), [](double v) { return static_cast<float>(v); });
    if (quant.dtype == DType::kF16) {  // the rows are bf16: only f16 rounds them again
      for (float& v : row) v = f32_from_f16(f16_from_f32(v));
    }
    const experts::RefOperand q =
        experts::ref_quantize_row(quant, input_scale, row.data(), h, scales.data(), codes.data());
    for (std::int64_t k = 0; k < h; ++k) {
      const float scale = q.scales == nullptr ? 1.0F : q.scales[q.group > 0 ? k / q.group : 0];
      sums.add(static_cast<double>(q.values[k]) * static_cast<double>(scale) *
                   static_cast<double>(q.outer),
               x[k]);
    }
  }
  return sums.relative();
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}
double norm(const std::vector<double>& a) {
  double sum = 0;
  for (const double x : a) sum += x * x;
  return std::sqrt(sum);
}

}  // namespace

Result<AccuracyCase> gaussian_case(std::uint64_t seed) {
  AccuracyCase c;
  c.name = "Gaussian";
  c.num_experts = 4;
  c.top_k = 1;
  c.hidden_size = c.intermediate_size = 512;
  const std::int64_t tokens = 64;
  for (std::uint64_t e = 0; e < 4; ++e) {
    const double sd = 1.0 / std::sqrt(512.0);
    MOESAIC_ASSIGN_OR_RETURN(Tensor w13, random_tensor(DType::kF32, {1024, 512}, sd, seed + 2 * e));
    MOESAIC_ASSIGN_OR_RETURN(Tensor w2,
                             random_tensor(DType::kF32, {512, 512}, sd, seed + 2 * e + 1));
    c.w13.push_back(std::move(w13));
    c.w2.push_back(std::move(w2));
  }
  MOESAIC_ASSIGN_OR_RETURN(c.hidden_states,
                           random_tensor(DType::kBF16, {tokens, 512}, 1.0, seed + 100));
  MOESAIC_ASSIGN_OR_RETURN(Routing routing, random_routing("uniform", tokens, 4, 1, seed + 101));
  c.topk_ids = std::move(routing.ids);
  c.topk_weights = std::move(routing.weights);
  return c;
}

namespace {

// Of rows that are no rows, or without a value, no scheme has an error that could be judged.
Status check_rows(const std::string& name, const std::vector<double>& rows) {
  const auto is_finite = [](double x) { return std::isfinite(x); };
  const char* found = rows.empty()                                        ? "0 tokens"
                      : !std::all_of(rows.begin(), rows.end(), is_finite) ? "NaN or infinity"
                      : std::count(rows.begin(), rows.end(), 0.0) == std::ssize(rows)
                          ? "zeros alone"
                          : nullptr;
  if (found == nullptr) return {};
  return {StatusCode::kCorruptFile,
          fmt::format("{}: got {}, need rows of finite numbers: nothing would be measured", name,
                      found)};
}

}  // namespace

Result<AccuracyCase> model_case(const std::string& model, std::int64_t max_tokens) {
  MOESAIC_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(model));
  MOESAIC_ASSIGN_OR_RETURN(const TensorFile golden, TensorFile::open(golden_beside(model)));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<GoldenBlock> blocks, golden_blocks(golden));
  MOESAIC_ASSIGN_OR_RETURN(MoeLayerWeights weights,
                           checkpoint.load_layer(blocks.front().layer, {}));
  const MoeLayerSpec spec = weights.spec;
  if (spec.activation != ActivationSpec{} || spec.has_expert_bias) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: got activation {}, need gated silu without expert biases", model,
                              activation_name(spec.activation.kind)));
  }
  AccuracyCase c;
  c.name = name_of_path(model);
  c.num_experts = spec.num_experts;
  c.top_k = spec.routing.top_k;
  c.hidden_size = spec.hidden_size;
  c.intermediate_size = spec.intermediate_size;
  for (std::int64_t e = 0; e < c.num_experts; ++e) {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView v, weights.experts->expert(e));
    const auto& forms = spec.quant.forms;
    const quant::StoredMatrix m13 = {
        v.w13,      v.w13_scale, v.w13_global_scale, v.w13_channel_scale,
        v.w13_zero, v.w13_min,   v.w13_perm};
    const quant::StoredMatrix m2 = {v.w2,      v.w2_scale, v.w2_global_scale, v.w2_channel_scale,
                                    v.w2_zero, v.w2_min,   v.w2_perm};
    MOESAIC_ASSIGN_OR_RETURN(Tensor w13,
                             Tensor::zeros(DType::kF32, {2 * c.intermediate_size, c.hidden_size}));
    MOESAIC_ASSIGN_OR_RETURN(Tensor w2,
                             Tensor::zeros(DType::kF32, {c.hidden_size, c.intermediate_size}));
    MOESAIC_RETURN_IF_ERROR(quant::dequantize_weight(forms ? forms->w13 : spec.quant.weight, m13,
                                                     c.intermediate_size, w13.view()));
    MOESAIC_RETURN_IF_ERROR(quant::dequantize_weight(forms ? forms->w2 : spec.quant.weight, m2,
                                                     c.hidden_size, w2.view()));
    c.w13.push_back(std::move(w13));
    c.w2.push_back(std::move(w2));
  }
  MOESAIC_ASSIGN_OR_RETURN(
      const Tensor all,
      read_hidden_states(golden, blocks.front().prefix + ".input", c.hidden_size));
  const std::int64_t tokens = std::min(all.shape()[0], max_tokens);
  MOESAIC_ASSIGN_OR_RETURN(c.hidden_states, Tensor::zeros(DType::kBF16, {tokens, c.hidden_size}));
  for (std::int64_t i = 0; i < tokens * c.hidden_size; ++i) {
    store_from_f32(c.hidden_states.data(), DType::kBF16, i,
                   load_as_f32(all.data(), all.dtype(), i));
  }
  MOESAIC_RETURN_IF_ERROR(
      check_rows(blocks.front().prefix + ".input", to_doubles(c.hidden_states.view())));
  FusedMoE::Options options;
  options.quant = "f32";
  options.max_tokens = tokens;
  MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, FusedMoE::create(std::move(weights), options));
  MOESAIC_ASSIGN_OR_RETURN(LayerOutput got, make_layer_output(spec, tokens, DType::kF32));
  MOESAIC_RETURN_IF_ERROR(forward(layer, c.hidden_states, got));
  c.output_norm = norm(to_doubles(got.output.view()));
  c.topk_ids = std::move(got.topk_ids);
  c.topk_weights = std::move(got.topk_weights);
  return c;
}

namespace {

bool has_static_scale(const Scheme& scheme) {
  return scheme.activation.outer_scale == OuterScale::kTensor ||
         (!scheme.activation.dynamic && !scheme.weight_only());
}

}  // namespace

Result<SchemeRun> run_scheme(const AccuracyCase& data, const Scheme& scheme, const Tensor& rows,
                             int num_threads) {
  MOESAIC_ASSIGN_OR_RETURN(const Scheme f32, quant_scheme_from_name("f32"));
  const Scheme wide = with_weight(f32, scheme.weight);
  const bool two_levels = scheme.activation.outer_scale == OuterScale::kTensor;
  double unused = 0;
  MOESAIC_ASSIGN_OR_RETURN(const auto stored,
                           store(data, scheme.weight, &unused, two_levels ? 2688.0F : 448.0F));
  StoredSource source(stored, has_static_scale(scheme)), plain_source(stored, false);
  SchemeRun run;
  run.numerics.resize(static_cast<std::size_t>(rows.shape()[0]));
  std::string backend;
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> got,
                           run_experts(data, accuracy_problem(data, scheme, num_threads), rows,
                                       source, &backend, run.numerics));
  std::vector<RowNumerics> of_exact(run.numerics.size());
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> exact,
                           run_experts(data, accuracy_problem(data, wide, num_threads), rows,
                                       plain_source, &backend, of_exact));
  const double parts = std::sqrt(summarize(of_exact).size);
  run.arithmetic = distance(got, exact) / std::max(parts, norm(exact));
  return run;
}

Result<AccuracyRow> measure_accuracy(const AccuracyCase& data, const Scheme& scheme,
                                     int num_threads) {
  MOESAIC_ASSIGN_OR_RETURN(const Scheme f32, quant_scheme_from_name("f32"));
  AccuracyRow row;
  row.scheme = std::string(scheme.name);
  std::string exact_backend;
  double unused = 0;
  MOESAIC_ASSIGN_OR_RETURN(const auto originals, store(data, f32.weight, &unused));
  StoredSource original_source(originals, false);
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> exact,
                           run_experts(data, accuracy_problem(data, f32, num_threads),
                                       data.hidden_states, original_source, &exact_backend));

  MOESAIC_ASSIGN_OR_RETURN(const auto stored, store(data, scheme.weight, &row.weights));
  row.activations = activation_error(data, scheme.activation);
  StoredSource source(stored, has_static_scale(scheme));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> got,
                           run_experts(data, accuracy_problem(data, scheme, num_threads),
                                       data.hidden_states, source, &row.backend));
  // fp32 arithmetic on the stored weights: what the scheme's own bound is measured against.
  const Scheme wide = with_weight(f32, scheme.weight);
  StoredSource plain_source(stored, false);
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> same_weights,
                           run_experts(data, accuracy_problem(data, wide, num_threads),
                                       data.hidden_states, plain_source, &exact_backend));

  const double size = data.output_norm > 0 ? data.output_norm : norm(exact);
  row.output = distance(got, exact) / size;
  row.arithmetic = distance(got, same_weights) / size;
  row.weights_bound = quant::kRoundingMargin * quant::rounding_error(scheme.weight);
  row.activations_bound = quant::kRoundingMargin * quant::rounding_error(scheme.activation);
  row.arithmetic_bound = scheme.output_bound;
  row.output_bound = std::hypot(scheme.output_bound, quant::kWeightErrorGain * row.weights_bound);
  return row;
}

}  // namespace moesaic::tool
