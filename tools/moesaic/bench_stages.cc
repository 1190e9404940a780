#include "bench_stages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "bench_random.h"
#include "bench_reference.h"
#include "cpu/tiers.h"
#include "moesaic/gate.h"
#include "moesaic/router.h"

namespace moesaic::tool {
namespace {

constexpr std::uint64_t kRoutingSeed = 0x9E37;

// Few tokens touch few experts: more rotations keep the touched weights out of the caches.
int rotations_for(std::int64_t tokens, const BenchSettings& settings) {
  if (settings.options.device.is_cuda()) return tokens <= 256 ? 8 : tokens <= 1024 ? 4 : 2;
  return tokens <= 16 ? 8 : tokens <= 256 ? 4 : 2;
}

// The device reads bf16 rows.
DType row_dtype(const BenchSettings& settings) {
  return settings.options.device.is_cuda() ? DType::kBF16 : settings.spec.activation_dtype;
}

MoeProblem problem_of(const MoeLayerSpec& spec, std::int64_t max_tokens, int num_threads) {
  MoeProblem p;
  p.num_experts = p.num_local_experts = spec.num_experts;
  p.top_k = spec.routing.top_k;
  p.hidden_size = spec.hidden_size;
  p.intermediate_size = spec.intermediate_size;
  p.activation = spec.activation;
  p.quant = spec.quant;
  p.activation_dtype = spec.activation_dtype;
  p.has_expert_bias = spec.has_expert_bias;
  p.apply_router_weight_on_input = spec.apply_router_weight_on_input;
  p.max_tokens = max_tokens;
  p.num_threads = num_threads;
  return p;
}

double matrices(const MoeLayerSpec& spec) { return is_gated(spec.activation.kind) ? 3 : 2; }

// Stored bytes of one weight of the experts, scales, zero points and minima of groups and blocks
// included; one scale for a whole row or matrix is next to nothing.
double bytes_per_weight(const QuantScheme& quant) {
  const double bytes = dtype_bits(quant.weight.dtype) / 8.0;
  if (quant.weight.block_k == 0) return bytes;
  const double scale = quant.weight.scale_format == ScaleFormat::kF32 ? 4.0 : 1.0;
  const ZeroPoint zero = quant.weight.zero_point;
  const double origin = zero == ZeroPoint::kMin ? 4.0 : zero == ZeroPoint::kInteger ? 1.0 : 0.0;
  return bytes +
         (scale + origin) / static_cast<double>(quant.weight.block_n * quant.weight.block_k);
}

double expert_weights(const MoeLayerSpec& spec, std::int64_t intermediate) {
  return matrices(spec) * static_cast<double>(spec.hidden_size) * static_cast<double>(intermediate);
}

void add_touched(const Tensor& ids, std::set<std::int32_t>& seen) {
  const std::int64_t n = ids.bytes() / 4;
  for (std::int64_t i = 0; i < n; ++i) seen.insert(ids.as<std::int32_t>()[i]);
  seen.erase(-1);
}
std::int64_t touched_experts(const Tensor& ids) {
  std::set<std::int32_t> seen;
  add_touched(ids, seen);
  return static_cast<std::int64_t>(seen.size());
}

// A GPU's rotations together touch several times the 50 MB of its L2, so that experts come from
// memory: enough of them, or all experts.
constexpr double kPastTheCache = 256e6;
constexpr int kMostRotations = 32;

struct Workspace {
  static Result<Workspace> allocate(std::int64_t bytes) {
    Workspace w;
    MOESAIC_ASSIGN_OR_RETURN(w.memory, Tensor::uninitialized(DType::kU8, {bytes}));
    return w;
  }
  std::span<std::byte> span() { return {memory.data(), static_cast<std::size_t>(memory.bytes())}; }
  Tensor memory;
};

Status upper_bound_check(const BenchPoint& point, std::string_view what) {
  if (point.rel_l2 <= point.bound) return {};
  return {StatusCode::kInternal,
          fmt::format("{}: relative L2 against float64 is {:.2e}, bound {:.2e}", what, point.rel_l2,
                      point.bound)};
}

class ExpertsStage final : public BenchStage {
 public:
  static Result<std::unique_ptr<BenchStage>> create(const BenchSettings& settings) {
    auto stage = std::make_unique<ExpertsStage>();
    stage->s_ = settings;
    stage->p_ =
        problem_of(settings.spec, settings.options.max_tokens, settings.options.num_threads);
    const bool gpu = settings.options.device.is_cuda();
    const ExpertsBackend* row = nullptr;
    if (!gpu) {
      MOESAIC_ASSIGN_OR_RETURN(row, choose_experts(stage->p_, settings.options.backend));
    }
    if (settings.checkpoint != nullptr) {
      MOESAIC_ASSIGN_OR_RETURN(
          MoeLayerWeights weights,
          settings.checkpoint->load_layer(settings.spec.layer, {}, settings.options.progress));
      stage->source_ = std::move(weights.experts);
    } else {
      stage->source_ = make_random_source(stage->p_, settings.seed);
    }
    if (gpu) {
      MOESAIC_ASSIGN_OR_RETURN(
          stage->gpu_, make_gpu_experts(settings.options.device, stage->p_, *stage->source_));
    } else {
      MOESAIC_ASSIGN_OR_RETURN(stage->experts_, row->create(stage->p_, *stage->source_));
    }
    return std::unique_ptr<BenchStage>(std::move(stage));
  }

  std::string backend() const override {
    return gpu_ ? "cuda_sm90" : std::string(experts_->name());
  }
  std::string quant() const override { return std::string(p_.quant.name); }

  Result<BenchPoint> prepare(std::int64_t tokens) override {
    struct Rotation {
      Tensor x, y;
      Routing routing;
    };
    auto rotations = std::make_shared<std::vector<Rotation>>();
    BenchPoint point;
    point.rotations = rotations_for(tokens, s_);
    for (int i = 0; i < point.rotations; ++i) {
      const std::uint64_t seed = s_.seed * 1000003 + static_cast<std::uint64_t>(i);
      Rotation r;
      MOESAIC_ASSIGN_OR_RETURN(r.x,
                               random_tensor(row_dtype(s_), {tokens, p_.hidden_size}, 1.0, seed));
      MOESAIC_ASSIGN_OR_RETURN(r.y, Tensor::zeros(row_dtype(s_), {tokens, p_.hidden_size}));
      MOESAIC_ASSIGN_OR_RETURN(r.routing, random_routing(s_.routing, tokens, p_.num_experts,
                                                         p_.top_k, kRoutingSeed + seed));
      point.bytes +=
          (static_cast<double>(touched_experts(r.routing.ids)) *
               expert_weights(s_.spec, p_.intermediate_size) * bytes_per_weight(p_.quant) +
           static_cast<double>(r.x.bytes() + r.y.bytes())) /
          point.rotations;
      rotations->push_back(std::move(r));
    }
    point.flops = 2.0 * static_cast<double>(tokens * p_.top_k) *
                  expert_weights(s_.spec, p_.intermediate_size);
    auto workspace = std::make_shared<Workspace>();
    if (!gpu_) {
      MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, experts_->workspace_size(tokens));
      MOESAIC_ASSIGN_OR_RETURN(*workspace, Workspace::allocate(bytes));
    }
    point.run = [this, rotations, workspace](int i) -> Status {
      Rotation& r = (*rotations)[static_cast<std::size_t>(i)];
      if (gpu_) {
        return gpu_->run({r.x.view(), r.routing.ids.view(), r.routing.weights.view()},
                         {r.y.view()});
      }
      return experts_->run({.hidden_states = r.x.view(),
                            .topk_ids = r.routing.ids.view(),
                            .topk_weights = r.routing.weights.view(),
                            .expert_map = {},
                            .expert_num_tokens = {},
                            .workspace = workspace->span(),
                            .output = r.y.view()});
    };
    MOESAIC_RETURN_IF_ERROR(point.run(0));
    const Rotation& first = rotations->front();
    const auto k = static_cast<std::size_t>(p_.top_k);
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> want,
                             reference_token(p_, *source_, row_to_doubles(first.x.view(), 0),
                                             {first.routing.ids.as<std::int32_t>(), k},
                                             {first.routing.weights.as<float>(), k}));
    point.rel_l2 = relative_l2(row_to_doubles(first.y.view(), 0), want);
    // The output is stored in the activation dtype: half an ulp of it comes on top.
    point.bound = p_.quant.output_bound + std::ldexp(1.0, row_dtype(s_) == DType::kF32 ? -24 : -8);
    MOESAIC_RETURN_IF_ERROR(upper_bound_check(point, "experts"));
    if (gpu_) {
      std::vector<std::vector<ConstTensorView>> in;
      std::vector<std::vector<TensorView>> out;
      for (Rotation& r : *rotations) {
        in.push_back({r.x.view(), r.routing.ids.view(), r.routing.weights.view()});
        out.push_back({r.y.view()});
      }
      MOESAIC_ASSIGN_OR_RETURN(point.time, gpu_->timer(in, out));
    }
    return point;
  }

 private:
  BenchSettings s_;
  MoeProblem p_;
  std::unique_ptr<ExpertSource> source_;
  std::unique_ptr<Experts> experts_;
  std::unique_ptr<GpuStage> gpu_;  // instead of experts_
};

// The gates of published models are 0.5 to 5.5 MB, an H100 caches 50.
constexpr int kGpuGateRotations = 40;

class GateStage final : public BenchStage {
 public:
  static Result<std::unique_ptr<BenchStage>> create(const BenchSettings& settings) {
    auto stage = std::make_unique<GateStage>();
    stage->s_ = settings;
    MoeLayerTensors tensors;
    if (settings.checkpoint != nullptr) {
      MOESAIC_ASSIGN_OR_RETURN(MoeLayerWeights weights,
                               settings.checkpoint->load_layer(settings.spec.layer, {}));
      tensors = std::move(weights.tensors);
    } else {
      MOESAIC_ASSIGN_OR_RETURN(tensors, random_layer_tensors(settings.spec, settings.seed));
    }
    GateLinear::Options options;
    options.out_dtype = DType::kF32;
    options.force_fp32_compute = true;
    options.num_threads = settings.options.num_threads;
    ConstTensorView bias;
    if (tensors.gate_bias.present()) bias = tensors.gate_bias.view();
    MOESAIC_ASSIGN_OR_RETURN(GateLinear gate,
                             GateLinear::create(tensors.gate_weight.view(), bias, options));
    stage->gate_ = std::make_unique<GateLinear>(std::move(gate));
    if (settings.options.device.is_cuda()) {
      // Copies that together pass the cache, as the weights of other layers would.
      MOESAIC_ASSIGN_OR_RETURN(
          stage->gpu_, make_gpu_gate(settings.options.device, tensors.gate_weight.view(), bias,
                                     kGpuGateRotations));
    }
    stage->weight_ = std::move(tensors.gate_weight);
    stage->bias_ = std::move(tensors.gate_bias);
    return std::unique_ptr<BenchStage>(std::move(stage));
  }

  std::string backend() const override {
    return gpu_ ? "cuda_gate" : fmt::format("cpu_gate_{}", gate_tier_name(tier_));
  }
  std::string quant() const override { return "f32"; }

  Result<BenchPoint> prepare(std::int64_t tokens) override {
    BenchPoint point;
    const std::int64_t h = gate_->hidden_size(), e = gate_->num_experts();
    tier_ = gate_->tier(tokens, row_dtype(s_));
    MOESAIC_ASSIGN_OR_RETURN(Tensor x, random_tensor(row_dtype(s_), {tokens, h}, 1.0, s_.seed));
    MOESAIC_ASSIGN_OR_RETURN(Tensor y, Tensor::zeros(DType::kF32, {tokens, e}));
    struct Buffers {
      Tensor x, y;
    };
    auto b = std::make_shared<Buffers>(Buffers{std::move(x), std::move(y)});
    point.run = [this, b](int) {
      return gpu_ ? gpu_->run({b->x.view()}, {b->y.view()})
                  : gate_->forward(b->x.view(), b->y.view());
    };
    point.bytes = static_cast<double>(weight_.bytes() + b->x.bytes() + b->y.bytes());
    point.flops = 2.0 * static_cast<double>(tokens * e * h);
    MOESAIC_RETURN_IF_ERROR(point.run(0));
    const std::vector<double> in = row_to_doubles(b->x.view(), 0);
    std::vector<double> want(static_cast<std::size_t>(e));
    for (std::int64_t n = 0; n < e; ++n) {
      const std::vector<double> w = row_to_doubles(weight_.view(), n);
      double sum = 0;
      for (std::size_t i = 0; i < in.size(); ++i) sum += w[i] * in[i];
      if (bias_.present()) {
        sum += row_to_doubles(ConstTensorView(bias_.data(), bias_.dtype(), {1, e}),
                              0)[static_cast<std::size_t>(n)];
      }
      want[static_cast<std::size_t>(n)] = sum;
    }
    point.rel_l2 = relative_l2(row_to_doubles(b->y.view(), 0), want);
    point.bound = 2e-6;
    MOESAIC_RETURN_IF_ERROR(upper_bound_check(point, "gate"));
    if (gpu_) {
      const std::vector<std::vector<ConstTensorView>> inputs(kGpuGateRotations, {b->x.view()});
      const std::vector<std::vector<TensorView>> outputs(kGpuGateRotations, {b->y.view()});
      MOESAIC_ASSIGN_OR_RETURN(point.time, gpu_->timer(inputs, outputs));
    }
    return point;
  }

 private:
  BenchSettings s_;
  std::unique_ptr<GateLinear> gate_;
  Tensor weight_, bias_;
  GateTier tier_ = GateTier::kFallback;
  std::unique_ptr<GpuStage> gpu_;
};

// What skews a random gate's logits as --routing says.
Result<std::vector<float>> routing_bias_of(const BenchSettings& settings) {
  const RoutingSpec& r = settings.spec.routing;
  return routing_bias(settings.routing, r.num_experts, r.num_experts + r.num_zero_experts, r.top_k);
}

class RouteStage final : public BenchStage {
 public:
  static Result<std::unique_ptr<BenchStage>> create(const BenchSettings& settings) {
    auto stage = std::make_unique<RouteStage>();
    stage->s_ = settings;
    MOESAIC_ASSIGN_OR_RETURN(stage->tensors_, random_layer_tensors(settings.spec, settings.seed));
    Router::Options options;
    options.spec = settings.spec.routing;
    if (options.spec.has_correction_bias)
      options.correction_bias = stage->tensors_.e_score_correction_bias.view();
    options.num_threads = settings.options.num_threads;
    MOESAIC_ASSIGN_OR_RETURN(Router router, Router::create(options));
    stage->router_ = std::make_unique<Router>(std::move(router));
    if (settings.options.device.is_cuda()) {
      MOESAIC_ASSIGN_OR_RETURN(stage->gpu_, make_gpu_router(settings.options.device, options));
    }
    return std::unique_ptr<BenchStage>(std::move(stage));
  }

  std::string backend() const override { return (gpu_ ? "cuda_" : "") + router_->name(); }
  std::string quant() const override { return "f32"; }

  Result<BenchPoint> prepare(std::int64_t tokens) override {
    BenchPoint point;
    struct Buffers {
      Tensor logits, ids, weights;
    };
    Buffers made;
    const RoutingSpec& r = s_.spec.routing;
    MOESAIC_ASSIGN_OR_RETURN(
        made.logits,
        random_tensor(DType::kF32, {tokens, r.num_experts + r.num_zero_experts}, 1.0, s_.seed));
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> bias, routing_bias_of(s_));
    for (std::int64_t i = 0; !bias.empty() && i < made.logits.shape().num_elements().value(); ++i) {
      made.logits.as<float>()[i] += bias[static_cast<std::size_t>(i) % bias.size()];
    }
    MOESAIC_ASSIGN_OR_RETURN(made.ids, Tensor::zeros(DType::kI32, {tokens, router_->slots()}));
    MOESAIC_ASSIGN_OR_RETURN(made.weights, Tensor::zeros(DType::kF32, {tokens, router_->slots()}));
    auto b = std::make_shared<Buffers>(std::move(made));
    point.run = [this, b](int) {
      if (gpu_) return gpu_->run({b->logits.view()}, {b->ids.view(), b->weights.view()});
      Router::Args args;
      args.router_logits = b->logits.view();
      args.topk_ids = b->ids.view();
      args.topk_weights = b->weights.view();
      return router_->select_experts(args);
    };
    point.bytes = static_cast<double>(b->logits.bytes() + b->ids.bytes() + b->weights.bytes());
    // A score per logit is a handful of operations; selection is comparisons. The floor is the
    // bytes.
    point.flops = 0;
    MOESAIC_RETURN_IF_ERROR(point.run(0));
    MOESAIC_RETURN_IF_ERROR(check(*b, point));
    if (gpu_) {
      constexpr std::size_t kRotations = 20;  // one launch alone would time the graph's start
      const std::vector<std::vector<ConstTensorView>> in(kRotations, {b->logits.view()});
      const std::vector<std::vector<TensorView>> out(kRotations,
                                                     {b->ids.view(), b->weights.view()});
      MOESAIC_ASSIGN_OR_RETURN(point.time, gpu_->timer(in, out));
    }
    return point;
  }

 private:
  // The weights of the first row: scores of the chosen experts in float64, up to a common factor
  // when renormalised.
  template <class Buffers>
  Status check(const Buffers& b, BenchPoint& point) const {
    const RoutingSpec& r = s_.spec.routing;
    const std::vector<double> logits = row_to_doubles(b.logits.view(), 0);
    const double top = *std::max_element(logits.begin(), logits.end());
    std::vector<double> got = row_to_doubles(b.weights.view(), 0), want;
    for (std::size_t j = 0; j < got.size(); ++j) {
      const double l = logits[static_cast<std::size_t>(b.ids.template as<std::int32_t>()[j])];
      const bool softmax =
          r.method == RoutingMethod::kTopKSoftmax || r.scoring_func == ScoringFunc::kSoftmax;
      want.push_back(softmax ? std::exp(l - top)
                     : r.scoring_func == ScoringFunc::kSigmoid
                         ? 1 / (1 + std::exp(-l))
                         : std::sqrt(std::log1p(std::exp(l))));
    }
    const auto normalise = [](std::vector<double>& v) {
      double sum = 0;
      for (const double x : v) sum += x;
      for (double& x : v) x /= sum;
    };
    normalise(got);
    normalise(want);
    point.rel_l2 = relative_l2(got, want);
    point.bound = 2e-6;
    return upper_bound_check(point, "route");
  }
  BenchSettings s_;
  MoeLayerTensors tensors_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<GpuStage> gpu_;
};

// This rank's experts of a source of all.
class RankSource final : public ExpertSource {
 public:
  RankSource(std::unique_ptr<ExpertSource> all, std::vector<std::int64_t> ids)
      : all_(std::move(all)), ids_(std::move(ids)) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override {
    return all_->expert(ids_[static_cast<std::size_t>(e)]);
  }

 private:
  std::unique_ptr<ExpertSource> all_;
  std::vector<std::int64_t> ids_;
};

class LayerStage final : public BenchStage {
 public:
  static Result<std::unique_ptr<BenchStage>> create(const BenchSettings& settings) {
    if (settings.checkpoint != nullptr && settings.routing != "uniform") {
      return Status(StatusCode::kUnsupported,
                    fmt::format("--routing {}: a checkpoint's layer routes by its own gate; use "
                                "--shape, or --stage experts",
                                settings.routing));
    }
    auto stage = std::make_unique<LayerStage>();
    stage->s_ = settings;
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> bias, routing_bias_of(settings));
    if (!bias.empty()) stage->s_.spec.has_router_bias = true;  // how a random gate gets skewed
    MoeLayerWeights weights;
    if (settings.checkpoint != nullptr) {
      MOESAIC_ASSIGN_OR_RETURN(
          weights, settings.checkpoint->load_layer(settings.spec.layer, settings.options.parallel,
                                                   settings.options.progress));
      MOESAIC_ASSIGN_OR_RETURN(MoeLayerWeights again,
                               settings.checkpoint->load_layer(settings.spec.layer, {}));
      stage->check_source_ = std::move(again.experts);
    } else {
      const MoeProblem p =
          problem_of(settings.spec, settings.options.max_tokens, settings.options.num_threads);
      weights.spec = stage->s_.spec;
      MOESAIC_ASSIGN_OR_RETURN(weights.tensors,
                               random_layer_tensors(stage->s_.spec, settings.seed, bias));
      if (settings.options.parallel.tp_size > 1) {
        return Status(StatusCode::kUnsupported,
                      "--no-ep: random weights are drawn expert by expert; use --model for slices");
      }
      MOESAIC_ASSIGN_OR_RETURN(
          std::vector<std::int64_t> ids,
          local_expert_ids(settings.spec.num_experts, settings.options.parallel));
      weights.experts =
          std::make_unique<RankSource>(make_random_source(p, settings.seed), std::move(ids));
      stage->check_source_ = make_random_source(p, settings.seed);
    }
    stage->keep_shared(weights.tensors);
    stage->gate_bytes_ = weights.tensors.gate_weight.bytes();
    MOESAIC_ASSIGN_OR_RETURN(FusedMoE layer,
                             FusedMoE::create(std::move(weights), settings.options));
    stage->layer_ = std::make_unique<FusedMoE>(std::move(layer));
    return std::unique_ptr<BenchStage>(std::move(stage));
  }

  std::string backend() const override { return layer_->experts_backend(); }
  std::string quant() const override { return std::string(layer_->quant().name); }
  std::int64_t bytes_sent() const override { return layer_->bytes_sent(); }

  Result<BenchPoint> prepare(std::int64_t tokens) override {
    struct Rotation {
      Tensor x, y, ids, weights;
    };
    const MoeLayerSpec& spec = s_.spec;
    const std::int64_t k = spec.routing.top_k;
    auto rotations = std::make_shared<std::vector<Rotation>>();
    BenchPoint point;
    const auto run = [this](Rotation& r) {
      FusedMoE::Trace trace;
      trace.topk_ids = r.ids.view();
      trace.topk_weights = r.weights.view();
      return layer_->forward(r.x.view(), r.y.view(), trace);
    };
    const double fixed =
        static_cast<double>(gate_bytes_) +
        expert_weights(spec, spec.shared.intermediate_size) * bytes_per_weight(layer_->quant());
    const double expert_bytes =
        expert_weights(spec, spec.intermediate_size) * bytes_per_weight(layer_->quant());
    std::set<std::int32_t> touched;
    const auto enough = [&](int i) {
      if (i < rotations_for(tokens, s_)) return false;
      return !layer_->device().is_cuda() || i >= kMostRotations ||
             static_cast<double>(touched.size()) * expert_bytes >= kPastTheCache ||
             static_cast<std::int64_t>(touched.size()) == spec.num_experts;
    };
    for (int i = 0; !enough(i); ++i) {
      Rotation r;
      const std::uint64_t seed = s_.seed * 1000003 + static_cast<std::uint64_t>(i) +
                                 static_cast<std::uint64_t>(s_.engine) * 7919;
      MOESAIC_ASSIGN_OR_RETURN(r.x,
                               random_tensor(row_dtype(s_), {tokens, spec.hidden_size}, 1.0, seed));
      MOESAIC_ASSIGN_OR_RETURN(r.y, Tensor::zeros(row_dtype(s_), {tokens, spec.hidden_size}));
      MOESAIC_ASSIGN_OR_RETURN(r.ids, Tensor::zeros(DType::kI32, {tokens, k}));
      MOESAIC_ASSIGN_OR_RETURN(r.weights, Tensor::zeros(DType::kF32, {tokens, k}));
      MOESAIC_RETURN_IF_ERROR(run(r));
      add_touched(r.ids, touched);
      point.bytes += fixed + static_cast<double>(touched_experts(r.ids)) * expert_bytes +
                     static_cast<double>(r.x.bytes() + r.y.bytes());
      rotations->push_back(std::move(r));
    }
    point.rotations = static_cast<int>(rotations->size());
    point.bytes /= point.rotations;
    point.flops = 2.0 * static_cast<double>(tokens) *
                  (static_cast<double>(k) * expert_weights(spec, spec.intermediate_size) +
                   expert_weights(spec, spec.shared.intermediate_size) +
                   static_cast<double>(spec.num_experts * spec.hidden_size));
    point.run = [rotations, run](int i) { return run((*rotations)[static_cast<std::size_t>(i)]); };
    const Rotation& first = rotations->front();
    MOESAIC_RETURN_IF_ERROR(check(first.x, first.y, first.ids, first.weights, point));
    if (layer_->device().is_cuda()) {
      MOESAIC_ASSIGN_OR_RETURN(gpu_, make_gpu_layer(*layer_));
      std::vector<std::vector<ConstTensorView>> in;
      std::vector<std::vector<TensorView>> out;
      for (Rotation& r : *rotations) {
        in.push_back({r.x.view()});
        out.push_back({r.y.view()});
      }
      if (s_.options.communicator) {  // ranks wait for each other on the host
        MOESAIC_ASSIGN_OR_RETURN(point.run, gpu_->resident(in, out));
      } else {
        MOESAIC_ASSIGN_OR_RETURN(point.time, gpu_->timer(in, out));
      }
    }
    return point;
  }

 private:
  void keep_shared(const MoeLayerTensors& t) {
    if (s_.spec.shared.intermediate_size == 0) return;
    const auto copy = [](const Tensor& from) {
      Tensor to;
      if (!from.present()) return to;
      auto made = Tensor::uninitialized(from.dtype(), from.shape());
      if (!made.ok()) return to;
      to = std::move(made).value();
      std::copy(from.data(), from.data() + from.bytes(), to.data());
      return to;
    };
    shared_.shared_w13 = copy(t.shared_w13), shared_.shared_w13_scale = copy(t.shared_w13_scale);
    shared_.shared_w2 = copy(t.shared_w2), shared_.shared_w2_scale = copy(t.shared_w2_scale);
    shared_.shared_gate_weight = copy(t.shared_gate_weight);
    shared_.shared_quant = t.shared_quant;
  }

  // First token: the experts that the layer chose and the shared expert, in float64.
  Status check(const Tensor& x, const Tensor& y, const Tensor& ids, const Tensor& weights,
               BenchPoint& point) const {
    const auto k = static_cast<std::size_t>(s_.spec.routing.top_k);
    MoeProblem p = problem_of(s_.spec, 1, s_.options.num_threads);
    const std::vector<double> in = row_to_doubles(x.view(), 0);
    MOESAIC_ASSIGN_OR_RETURN(std::vector<double> want,
                             reference_token(p, *check_source_, in, {ids.as<std::int32_t>(), k},
                                             {weights.as<float>(), k}));
    if (s_.spec.routing.scale_on_output) {
      for (double& v : want) v *= s_.spec.routing.routed_scaling_factor;
    }
    if (s_.spec.shared.intermediate_size > 0) {
      StackedExpertWeights stacked;
      stacked.w13 = shared_.shared_w13.view(), stacked.w2 = shared_.shared_w2.view();
      if (shared_.shared_w13_scale.present()) stacked.w13_scale = shared_.shared_w13_scale.view();
      if (shared_.shared_w2_scale.present()) stacked.w2_scale = shared_.shared_w2_scale.view();
      p.intermediate_size = s_.spec.shared.intermediate_size;
      p.quant = shared_.shared_quant;
      p.has_expert_bias = p.apply_router_weight_on_input = false;
      const auto source = make_stacked_source(stacked);
      float factor = 1.0F;
      if (shared_.shared_gate_weight.present()) {
        const std::vector<double> g = row_to_doubles(shared_.shared_gate_weight.view(), 0);
        double dot = 0;
        for (std::size_t i = 0; i < g.size(); ++i) dot += g[i] * in[i];
        factor = static_cast<float>(1 / (1 + std::exp(-dot)));
      }
      const std::int32_t zero = 0;
      MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> s,
                               reference_token(p, *source, in, {&zero, 1}, {&factor, 1}));
      for (std::size_t i = 0; i < want.size(); ++i) want[i] += s[i];
    }
    point.rel_l2 = relative_l2(row_to_doubles(y.view(), 0), want);
    point.bound =
        layer_->quant().output_bound + std::ldexp(1.0, row_dtype(s_) == DType::kF32 ? -24 : -8);
    return upper_bound_check(point, "layer");
  }

  BenchSettings s_;
  std::unique_ptr<FusedMoE> layer_;
  std::unique_ptr<ExpertSource> check_source_;
  MoeLayerTensors shared_;
  std::int64_t gate_bytes_ = 0;
  std::unique_ptr<GpuStage> gpu_;
};

}  // namespace

bool narrow_arithmetic(const std::string& stage, const BenchSettings& settings) {
  if (stage == "gate" || stage == "route") return false;
  QuantScheme scheme = settings.spec.quant;
  if (settings.options.quant != "as-is") {
    const Result<QuantScheme> named = quant_scheme_from_name(settings.options.quant);
    if (named.ok()) scheme = *named;
  }
  return scheme.activation.dtype == DType::kBF16 || scheme.activation.dtype == DType::kF8E4M3;
}

Result<std::unique_ptr<BenchStage>> make_bench_stage(const std::string& stage,
                                                     const BenchSettings& settings) {
  if (stage == "gate") return GateStage::create(settings);
  if (stage == "route") return RouteStage::create(settings);
  if (stage == "experts") return ExpertsStage::create(settings);
  if (stage == "layer") return LayerStage::create(settings);
  return Status(StatusCode::kInvalidArgument,
                fmt::format("--stage: got '{}', need gate, route, experts or layer", stage));
}

}  // namespace moesaic::tool
