// The gate stage and the routing stage of the bench.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "bench_parts.h"
#include "bench_random.h"
#include "bench_reference.h"
#include "cpu/tiers.h"
#include "layer_io.h"
#include "moesaic/gate.h"
#include "moesaic/router.h"

namespace moesaic::tool {
namespace {

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
    MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::current_kernels());
    stage->tier_ = kernels->name;
    GateLinear::Options options;
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
    return gpu_ ? "cuda_gate" : fmt::format("cpu_gate_{}", tier_);
  }
  std::string quant() const override { return "f32"; }

  Result<BenchPoint> prepare(std::int64_t tokens) override {
    BenchPoint point;
    const std::int64_t h = gate_->hidden_size(), e = gate_->num_experts();
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
  std::string tier_;
  std::unique_ptr<GpuStage> gpu_;
};

class RouteStage final : public BenchStage {
 public:
  static Result<std::unique_ptr<BenchStage>> create(const BenchSettings& settings) {
    MOESAIC_RETURN_IF_ERROR(check_routes_by_hidden_states(settings.spec));
    const RoutingMethod method = settings.spec.routing.method;
    if (method == RoutingMethod::kSparseMixer || method == RoutingMethod::kZeroExpert) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("--stage route: got routing method {}, whose weights are no scores "
                                "to check against; need --stage layer",
                                routing_method_name(method)));
    }
    auto stage = std::make_unique<RouteStage>();
    stage->s_ = settings;
    MOESAIC_ASSIGN_OR_RETURN(stage->tensors_, random_layer_tensors(settings.spec, settings.seed));
    Router::Options options;
    options.spec = settings.spec.routing;
    if (options.spec.has_correction_bias)
      options.correction_bias = stage->tensors_.e_score_correction_bias.view();
    options.expert_scale = stage->tensors_.expert_scale.view();
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
      const std::int32_t id = b.ids.template as<std::int32_t>()[j];
      const double l = logits[static_cast<std::size_t>(id)];
      const bool sigmoid =
          r.method == RoutingMethod::kLlama4 || r.scoring_func == ScoringFunc::kSigmoid;
      const bool softmax = r.method == RoutingMethod::kTopKSoftmax ||
                           (!sigmoid && r.scoring_func == ScoringFunc::kSoftmax);
      const double score = softmax   ? std::exp(l - top)
                           : sigmoid ? 1 / (1 + std::exp(-l))
                                     : std::sqrt(std::log1p(std::exp(l)));
      const double scale =
          tensors_.expert_scale.present() ? tensors_.expert_scale.as<float>()[id] : 1.0;
      want.push_back(score * scale);
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

}  // namespace

Result<std::unique_ptr<BenchStage>> make_gate_stage(const BenchSettings& settings) {
  return GateStage::create(settings);
}

Result<std::unique_ptr<BenchStage>> make_route_stage(const BenchSettings& settings) {
  return RouteStage::create(settings);
}

}  // namespace moesaic::tool
