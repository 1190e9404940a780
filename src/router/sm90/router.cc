#include "router/sm90/router.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "core/fault.h"
#include "core/guarded.h"
#include "cuda/device_memory.h"
#include "router/router_checks.h"
#include "router/sm90/route.h"
#include "router/sm90/routing_ops.h"

namespace moesaic::cuda {

struct CudaRouter::Impl {
  RoutingSpec spec;
  std::string name;
  int device = 0;
  Allocation bias, vision_bias, expert_scale, hash_table;
  DeviceRoutingFn custom;
  RouteParams params;  // without the tensors of a call

  Status upload_parts(const Router::Options& options);
  RouteParams of_call(const CudaRouterArgs& a) const;
  Status run_custom(void* stream, const CudaRouterArgs& a) const;
};

RouteParams CudaRouter::Impl::of_call(const CudaRouterArgs& a) const {
  RouteParams p = params;
  if (a.logits_dtype == DType::kF32) {
    p.logits = static_cast<const float*>(a.router_logits);
  } else {
    p.narrow_logits = a.router_logits;
    p.narrow_dtype = a.logits_dtype;
  }
  p.input_ids = a.input_ids;
  p.padding = a.padding_mask;
  p.weights = a.topk_weights;
  if (a.ids_dtype == DType::kI64) {
    p.wide_ids = static_cast<std::int64_t*>(a.topk_ids);
  } else {
    p.ids = static_cast<std::int32_t*>(a.topk_ids);
  }
  p.zero_weight = spec.num_zero_experts > 0 ? a.zero_expert_weight : nullptr;
  p.keeps_nan = a.keeps_nan;
  p.tokens = a.tokens;
  return p;
}

Status CudaRouter::Impl::upload_parts(const Router::Options& o) {
  const auto put = [](std::string_view what, const ConstTensorView& t, Allocation& to) -> Status {
    if (!t.present()) return {};
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(t.dtype, t.shape));
    return upload(what, t.data, bytes, to);
  };
  MOESAIC_RETURN_IF_ERROR(put("correction_bias", o.correction_bias, bias));
  MOESAIC_RETURN_IF_ERROR(put("vision_bias", o.vision_bias, vision_bias));
  MOESAIC_RETURN_IF_ERROR(put("expert_scale", o.expert_scale, expert_scale));
  MOESAIC_RETURN_IF_ERROR(put("hash_table", o.hash_table, hash_table));
  const auto narrow = [](std::int64_t v) { return static_cast<std::int32_t>(v); };
  params.bias = bias.as<float>();
  params.vision_bias = vision_bias.as<float>();
  params.expert_scale = expert_scale.as<float>();
  params.hash_table = hash_table.as<std::int32_t>();
  params.columns = narrow(spec.num_experts + spec.num_zero_experts);
  params.num_experts = narrow(spec.num_experts);
  params.top_k = narrow(spec.top_k);
  params.num_shared = narrow(o.num_fused_shared_experts);
  params.groups = narrow(spec.num_expert_group);
  params.topk_group = narrow(spec.topk_group);
  params.vocab = o.hash_table.present() ? narrow(o.hash_table.dim(0)) : 0;
  params.vision_base = narrow(std::min<std::int64_t>(o.vision_token_base, INT32_MAX));
  params.method = spec.method;
  params.scoring = spec.scoring_func;
  params.renormalize = spec.renormalize;
  params.renorm_floor = static_cast<float>(spec.renorm_floor);
  params.renorm_epsilon = static_cast<float>(spec.renorm_epsilon);
  params.scale = spec.scale_on_output ? 1.0F : static_cast<float>(spec.routed_scaling_factor);
  params.p_norm = static_cast<float>(spec.p_norm);
  params.jitter_eps = static_cast<float>(spec.jitter_eps);
  params.shared_weight = o.shared_expert_weight;
  params.groups_by_best_two = spec.has_correction_bias || spec.group_by_best_two;
  custom = o.custom_on_device;
  return {};
}

// The caller's function fills the outputs; what names nobody, and rows of padding, are put right.
Status CudaRouter::Impl::run_custom(void* stream, const CudaRouterArgs& a) const {
  const Device on = Device::cuda(device);
  const auto bytes = [](const void* p) { return static_cast<const std::byte*>(p); };
  const ConstTensorView logits(bytes(a.router_logits), a.logits_dtype, {a.tokens, params.columns},
                               on);
  const TensorView weights(reinterpret_cast<std::byte*>(a.topk_weights), DType::kF32,
                           {a.tokens, params.top_k}, on);
  const TensorView ids(static_cast<std::byte*>(a.topk_ids), DType::kI32, {a.tokens, params.top_k},
                       on);
  MOESAIC_RETURN_IF_ERROR(guarded("custom routing function", [&] {
    return custom(Stream{stream}, a.hidden_states, logits, params.renormalize, weights, ids);
  }));
  TakeRoutingParams p;
  p.weights = a.topk_weights;
  p.ids = a.topk_ids;
  p.padding = a.padding_mask;
  p.tokens = a.tokens;
  p.top_k = params.top_k;
  p.num_experts = MOESAIC_FAULT(cuda_custom_ids_unchecked) ? INT32_MAX : params.num_experts;
  p.topk_weights = a.topk_weights;
  p.topk_ids = static_cast<std::int32_t*>(a.topk_ids);
  return check_call("custom routing", launch_take_routing(p, stream));
}

Result<std::unique_ptr<CudaRouter>> CudaRouter::create(const Router::Options& options, int device) {
  MOESAIC_ASSIGN_OR_RETURN(const RoutingSpec spec, router::effective_routing(options.spec));
  MOESAIC_RETURN_IF_ERROR(router::check_router_parts(options, spec));
  MOESAIC_RETURN_IF_ERROR(can_implement(spec));
  if (options.capture) {
    return Status(StatusCode::kUnsupported,
                  "capture: got a callback, which the device cannot call; read topk_ids instead");
  }
  if (spec.method == RoutingMethod::kCustom && options.num_fused_shared_experts > 0) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("num_fused_shared_experts: got {} with custom routing on a GPU, need 0",
                    options.num_fused_shared_experts));
  }
  if (options.num_fused_shared_experts > kMaxRouteColumns) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("num_fused_shared_experts: got {}, need at most {}",
                              options.num_fused_shared_experts, kMaxRouteColumns));
  }
  const DeviceScope scope(device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_ASSIGN_OR_RETURN(const int unused, require_hopper(device));
  static_cast<void>(unused);
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl());
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the router");
  impl->spec = spec;
  impl->name = router::router_name(spec, options.simulation_strategy);
  impl->device = device;
  MOESAIC_RETURN_IF_ERROR(impl->upload_parts(options));
  std::unique_ptr<CudaRouter> router(new (std::nothrow) CudaRouter(std::move(impl)));
  if (!router) return Status(StatusCode::kOutOfMemory, "cannot allocate the router");
  return router;
}

Status CudaRouter::enqueue(void* stream, const CudaRouterArgs& a,
                           const ExpertsPrologue* prologue) const {
  const RoutingSpec& spec = impl_->spec;
  if (a.tokens < 0 || a.tokens > (std::int64_t{1} << 30)) {
    return {a.tokens < 0 ? StatusCode::kInvalidArgument : StatusCode::kLimitExceeded,
            fmt::format("tokens: got {}, need 0 .. 2^30", a.tokens)};
  }
  if (a.tokens == 0) return {};
  const auto need = [](std::string_view field, const void* p) -> Status {
    if (p != nullptr) return {};
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: got null, need a device pointer", field)};
  };
  MOESAIC_RETURN_IF_ERROR(need("router_logits", a.router_logits));
  MOESAIC_RETURN_IF_ERROR(need("topk_weights", a.topk_weights));
  MOESAIC_RETURN_IF_ERROR(need("topk_ids", a.topk_ids));
  if (spec.method == RoutingMethod::kHash) {
    MOESAIC_RETURN_IF_ERROR(need("input_ids", a.input_ids));
  }
  if (spec.num_zero_experts > 0) {
    MOESAIC_RETURN_IF_ERROR(need("zero_expert_weight", a.zero_expert_weight));
  }
  const DeviceScope scope(impl_->device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  if (spec.method == RoutingMethod::kCustom) {
    if (prologue == nullptr) return impl_->run_custom(stream, a);
    return {StatusCode::kInternal, "custom routing: got a prologue that no kernel of ours runs"};
  }
  return check_call("router", launch_route(impl_->of_call(a), prologue, stream));
}

std::optional<RouteParams> CudaRouter::usual(const CudaRouterArgs& a) const {
  const RoutingMethod method = impl_->spec.method;
  if (method != RoutingMethod::kTopK && method != RoutingMethod::kGroupedTopK) return std::nullopt;
  if (impl_->spec.scoring_func == ScoringFunc::kSqrtSoftplus || impl_->spec.num_zero_experts > 0 ||
      a.padding_mask != nullptr || impl_->spec.has_expert_scale || a.logits_dtype != DType::kF32 ||
      a.ids_dtype == DType::kI64 ||
      impl_->params.groups_by_best_two != (impl_->params.bias != nullptr)) {
    return std::nullopt;
  }
  return impl_->of_call(a);
}

std::int64_t CudaRouter::slots() const { return impl_->params.top_k + impl_->params.num_shared; }
const RoutingSpec& CudaRouter::spec() const { return impl_->spec; }
std::string CudaRouter::name() const { return impl_->name; }
int CudaRouter::device() const { return impl_->device; }

CudaRouter::CudaRouter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaRouter::~CudaRouter() = default;

}  // namespace moesaic::cuda
