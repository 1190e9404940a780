#include "layer/sm90/layer.h"

#include <fmt/format.h>

#include <new>
#include <utility>
#include <vector>

#include "layer/layer_router.h"
#include "layer/load_sources.h"
#include "layer/slot_source.h"
#include "layer/sm90/layer_impl.h"

namespace moesaic::cuda {

namespace {

// The experts of one source, then those of another.
class JoinedSource final : public ExpertSource {
 public:
  JoinedSource(ExpertSource& first, std::int64_t count, ExpertSource& second)
      : first_(first), count_(count), second_(second) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override {
    return e < count_ ? first_.expert(e) : second_.expert(e - count_);
  }

 private:
  ExpertSource& first_;
  std::int64_t count_;
  ExpertSource& second_;
};

// Fills max_tokens words with one value.
Status upload_constant(std::string_view what, std::int64_t count, std::uint32_t value,
                       Allocation& to) {
  try {
    const std::vector<std::uint32_t> words(static_cast<std::size_t>(count), value);
    return upload(what, words.data(), count * 4, to);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, fmt::format("{}: {} words on the host", what, count)};
  }
}

}  // namespace

Status CudaLayer::Impl::create_experts(const layer::EngineParts& parts) {
  MoeLayerWeights& weights = parts.weights;
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> routed,
                           layer::make_converting_source(*weights.experts, plan.quant));
  if (plan.routed.num_local_experts == 0) return {};  // more ranks than experts
  if (const FusedMoE::Options& o = parts.options; o.ranks.enable_eplb) {
    const std::int64_t logical = parts.spec.num_experts, physical = plan.routed.num_experts;
    MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<DeviceBalance> memory,
                             DeviceBalance::create(device, logical, physical, o.ranks.eplb_window));
    balance = memory.get();
    MOESAIC_ASSIGN_OR_RETURN(
        balancer,
        layer::ExpertBalancer::create({logical, physical, o.parallel.ep_size, o.parallel.ep_rank},
                                      o.ranks.eplb_window, std::move(memory)));
    layer::SlotSource slots(*routed, balancer->local_experts());
    MOESAIC_ASSIGN_OR_RETURN(experts, chosen.routed->create(plan.routed, slots, device));
    experts->let_parts_change();
    return {};
  }
  if (!joins) {
    MOESAIC_ASSIGN_OR_RETURN(experts, chosen.routed->create(plan.routed, *routed, device));
    return {};
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> converted,
                           layer::make_converting_source(*weights.shared, plan.shared_quant));
  JoinedSource source(*routed, plan.routed.num_local_experts, *converted);
  MOESAIC_ASSIGN_OR_RETURN(experts,
                           chosen.routed->create(experts_problem(plan, false), source, device));
  return {};
}

Status CudaLayer::Impl::create_shared(const MoeLayerSpec& spec, const FusedMoE::Options& options,
                                      MoeLayerWeights& weights) {
  if (!joins) {
    MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> converted,
                             layer::make_converting_source(*weights.shared, plan.shared_quant));
    MOESAIC_ASSIGN_OR_RETURN(shared, chosen.shared->create(plan.shared, *converted, device));
  }
  if (!spec.shared.gated_output) {
    constexpr std::uint32_t kOne = 0x3F800000;  // 1.0F
    const auto id = static_cast<std::uint32_t>(joins ? plan.routed.num_experts : 0);
    MOESAIC_RETURN_IF_ERROR(upload_constant("shared weights", options.max_tokens, kOne, ones));
    return upload_constant("shared ids", options.max_tokens, id, shared_ids);
  }
  MOESAIC_ASSIGN_OR_RETURN(shared_gate, CudaGate::create(weights.tensors.shared_gate_weight.view(),
                                                         {}, {}, plan.rows_dtype));
  Router::Options router_options;
  router_options.spec.method = RoutingMethod::kLlama4;
  router_options.spec.num_experts = router_options.spec.top_k = 1;
  MOESAIC_ASSIGN_OR_RETURN(shared_router, CudaRouter::create(router_options, device));
  return {};
}

CudaLayer::CudaLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaLayer::~CudaLayer() = default;

Result<std::unique_ptr<layer::LayerEngine>> make_sm90_engine(const layer::EngineParts& parts) {
  return CudaLayer::create(parts);
}

// All that needs no other rank.
Status CudaLayer::Impl::create_own(const layer::EngineParts& parts) {
  MOESAIC_RETURN_IF_ERROR(last_call.create());
  const MoeLayerSpec& spec = parts.spec;
  const FusedMoE::Options& options = parts.options;
  MoeLayerWeights& weights = parts.weights;
  const MoeLayerTensors& t = weights.tensors;
  if (plan.has_gate) {
    Result<CudaGate> made = CudaGate::create(t.gate_weight.view(), t.gate_bias.view(),
                                             plan.logit_rounding(), plan.rows_dtype);
    if (!made.ok()) return made.status().with_context("gate");
    gate = std::move(made).value();
  }
  if (plan.input_norm_eps > 0) {
    MOESAIC_RETURN_IF_ERROR(upload("experts_norm_weight", t.experts_norm_weight.data(),
                                   plan.hidden_size * 4, experts_norm_weight));
  }
  functions = options.on_device;
  if (plan.shared_stream && plan.adds_shared) {
    beside.reset(new (std::nothrow) Impl::Beside());
    if (!beside) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
    MOESAIC_RETURN_IF_ERROR(beside->streams.create());
  }
  Router::Options router_options = layer::layer_router_options(plan, t);
  router_options.device = options.device;
  router_options.custom_on_device = options.on_device.custom_routing;
  Result<std::unique_ptr<CudaRouter>> made = CudaRouter::create(router_options, device);
  if (!made.ok()) return made.status().with_context("router");
  router = std::move(made).value();
  joins = shared_joins(plan, spec.shared.gated_output);
  if (joins) {
    router_options.num_fused_shared_experts = 1;
    MOESAIC_ASSIGN_OR_RETURN(joined_router, CudaRouter::create(router_options, device));
  }
  if (!plan.expert_map.empty()) {
    std::vector<std::int32_t> map = plan.expert_map;
    if (joins) map.push_back(static_cast<std::int32_t>(plan.routed.num_local_experts));
    MOESAIC_RETURN_IF_ERROR(
        upload("expert_map", map.data(), static_cast<std::int64_t>(map.size()) * 4, expert_map));
  }
  MOESAIC_RETURN_IF_ERROR(create_experts(parts).with_context("experts"));
  if (plan.has_shared) {
    MOESAIC_RETURN_IF_ERROR(create_shared(spec, options, weights).with_context("shared_experts"));
  }
  return {};
}

Result<std::unique_ptr<layer::LayerEngine>> CudaLayer::create(const layer::EngineParts& parts) {
  const auto& [spec, plan, options, weights, mesh] = parts;
  MOESAIC_RETURN_IF_ERROR(can_implement(plan, options));
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl());
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  impl->plan = plan;
  MOESAIC_ASSIGN_OR_RETURN(impl->chosen, choose_layer_experts(plan));
  impl->mesh = mesh;
  impl->max_tokens = options.max_tokens;
  impl->device = options.device.index();
  const DeviceScope scope(impl->device);
  Status own = scope.status();
  if (own.ok()) own = impl->create_own(parts);
  if (!own.ok()) {
    return mesh != nullptr ? impl->withdraw_from_ranks(own) : own;
  }
  if (mesh != nullptr) {
    MOESAIC_RETURN_IF_ERROR(impl->create_ranks(options).with_context("ranks"));
  }
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(
      const LayerWorkspace unused,
      LayerWorkspace::carve(plan, impl->shared_gate.has_value(), options.max_tokens, arena));
  static_cast<void>(unused);
  MOESAIC_RETURN_IF_ERROR(impl->workspace.reserve("workspace", arena.used()));
  MOESAIC_RETURN_IF_ERROR(impl->make_prologue_plans());
  std::unique_ptr<layer::LayerEngine> layer(new (std::nothrow) CudaLayer(std::move(impl)));
  if (!layer) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  return layer;
}

layer::ExpertBalancer* CudaLayer::balancer() const { return impl_->balancer.get(); }

Result<std::vector<ExpertPart>> CudaLayer::expert_parts() const {
  try {
    if (!impl_->experts) return std::vector<ExpertPart>();
    impl_->experts->let_parts_change();
    return impl_->experts->expert_parts(impl_->plan.routed.num_local_experts);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "get_expert_weights: cannot allocate the list");
  }
}

std::string_view CudaLayer::experts_backend() const { return impl_->chosen.routed->name; }
std::string CudaLayer::determinism() const { return sm90_determinism(impl_->plan); }
std::int64_t CudaLayer::weight_bytes() const {
  const Impl& m = *impl_;
  return (m.gate ? m.gate->bytes() : 0) + (m.experts ? m.experts->weight_bytes() : 0) +
         (m.shared ? m.shared->weight_bytes() : 0) + (m.shared_gate ? m.shared_gate->bytes() : 0);
}
std::int64_t CudaLayer::workspace_bytes() const {
  const Impl& m = *impl_;
  return m.workspace.bytes() + m.slot_rows.bytes() + m.transport_bytes +
         (m.balance != nullptr ? m.balance->bytes() : 0) + (m.replicas ? m.replicas->bytes() : 0);
}

}  // namespace moesaic::cuda
