// What of the GPU router is decided without a device: part of every build.
#include <fmt/format.h>

#include "core/refusal.h"
#include "router/device_router.h"
#include "router/sm90/route.h"
#include "router/sm90/router.h"

namespace moesaic::cuda {

Status CudaRouter::can_implement(const RoutingSpec& spec) {
  if (spec.method == RoutingMethod::kCustom || spec.method == RoutingMethod::kSimulated) {
    return {StatusCode::kUnsupported,
            fmt::format("routing.method: got {}, a function on the host; need one of the library's",
                        routing_method_name(spec.method))};
  }
  if (spec.group_by_best_two && !spec.has_correction_bias) {
    return {StatusCode::kUnsupported,
            "routing.group_by_best_two: got true without a correction bias on a GPU, need false or "
            "the CPU"};
  }
  if (spec.has_expert_scale) {
    return {StatusCode::kUnsupported,
            "routing.has_expert_scale: got true on a GPU, need false or the CPU"};
  }
  const std::int64_t columns = spec.num_experts + spec.num_zero_experts;
  if (columns > kMaxRouteColumns) {
    return {StatusCode::kUnsupported,
            fmt::format("num_experts: got {} with zero experts, need at most {}", columns,
                        kMaxRouteColumns)};
  }
  return {};
}

}  // namespace moesaic::cuda

namespace moesaic::router {

Status check_device_select_args(const Router::Args& a, const RoutingSpec& spec, std::int64_t slots,
                                Device device) {
  const std::int64_t columns = spec.num_experts + spec.num_zero_experts;
  if (a.router_logits.rank() != 2) {
    return {StatusCode::kInvalidShape, fmt::format("router_logits: got {}, need [M, {}]",
                                                   a.router_logits.shape.to_string(), columns)};
  }
  if (a.eplb != nullptr || a.zero_expert_output.present()) {
    return unsupported(fmt::format("{}: got one on a GPU, need none or the CPU",
                                   a.eplb != nullptr ? "eplb" : "zero_expert_output"));
  }
  const std::int64_t tokens = a.router_logits.dim(0);
  struct Field {
    std::string_view field;
    ConstTensorView view;
    Shape shape;
    DType dtype;
    bool needed;
  };
  for (const Field& t :
       {Field{"router_logits", a.router_logits, {tokens, columns}, DType::kF32, true},
        Field{"topk_weights", a.topk_weights, {tokens, slots}, DType::kF32, true},
        Field{"topk_ids", a.topk_ids, {tokens, slots}, DType::kI32, true},
        Field{"input_ids", a.input_ids, {tokens}, DType::kI32, spec.method == RoutingMethod::kHash},
        Field{"padding_mask", a.padding_mask, {tokens}, DType::kU8, false}}) {
    if (!t.needed && !t.view.present()) continue;
    MOESAIC_RETURN_IF_ERROR(expect_dtype(t.field, t.view, t.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_shape(t.field, t.view, t.shape));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(t.field, t.view));
    MOESAIC_RETURN_IF_ERROR(expect_device(t.field, t.view, device));
  }
  MOESAIC_RETURN_IF_ERROR(
      expect_no_overlap("topk_weights", a.topk_weights, "router_logits", a.router_logits));
  MOESAIC_RETURN_IF_ERROR(
      expect_no_overlap("topk_ids", a.topk_ids, "router_logits", a.router_logits));
  return expect_no_overlap("topk_ids", a.topk_ids, "topk_weights", a.topk_weights);
}

}  // namespace moesaic::router
