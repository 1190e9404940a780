// What of the GPU router is decided without a device: part of every build.
#include <fmt/format.h>

#include <iterator>
#include <string_view>

#include "core/refusal.h"
#include "router/device_router.h"
#include "router/sm90/route.h"
#include "router/sm90/router.h"

namespace moesaic::cuda {

Status CudaRouter::can_implement(const RoutingSpec& spec) {
  if (spec.method == RoutingMethod::kSimulated) {
    return unsupported(
        fmt::format("routing.method: got {}, a function on the host; need another or the CPU",
                    routing_method_name(spec.method)));
  }
  if (spec.method == RoutingMethod::kCustom) return {};  // the columns are the function's
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

namespace {

struct Field {
  std::string_view field;
  ConstTensorView view;
  Shape shape;
  DType dtype;
  bool needed;
};

Status check_field(const Field& t, Device device) {
  if (!t.needed && !t.view.present()) return {};
  MOESAIC_RETURN_IF_ERROR(expect_dtype(t.field, t.view, t.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape(t.field, t.view, t.shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(t.field, t.view));
  return expect_device(t.field, t.view, device);
}

// Identity experts multiply rows, so these are there with an output of their shape.
Status check_zero_experts(const Router::Args& a, std::int64_t tokens, Device device) {
  const ConstTensorView& x = a.hidden_states;
  if (x.rank() != 2 || x.dim(0) != tokens) {
    return {StatusCode::kInvalidShape,
            fmt::format("hidden_states: got {}, need [{}, hidden_size] for zero experts",
                        x.shape.to_string(), tokens)};
  }
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", x.dtype));
  const DType out = a.zero_expert_output.dtype == DType::kF32 ? DType::kF32 : x.dtype;
  for (const Field& t : {Field{"hidden_states", x, x.shape, x.dtype, true},
                         Field{"zero_expert_output", a.zero_expert_output, x.shape, out, true}}) {
    MOESAIC_RETURN_IF_ERROR(check_field(t, device));
  }
  const std::int64_t bytes = device_router_workspace(tokens);
  if (std::ssize(a.workspace) < bytes) {
    return {StatusCode::kWorkspaceTooSmall,
            fmt::format("workspace: got {} bytes, need {}", a.workspace.size(), bytes)};
  }
  return {};
}

}  // namespace

Status check_device_select_args(const Router::Args& a, const RoutingSpec& spec, std::int64_t slots,
                                Device device) {
  const std::int64_t columns = spec.num_experts + spec.num_zero_experts;
  if (a.router_logits.rank() != 2) {
    return {StatusCode::kInvalidShape, fmt::format("router_logits: got {}, need [M, {}]",
                                                   a.router_logits.shape.to_string(), columns)};
  }
  if (a.eplb != nullptr) return unsupported("eplb: got one on a GPU, need none or the CPU");
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("router_logits", a.router_logits.dtype));
  const bool zero_experts = spec.num_zero_experts > 0;
  if (!zero_experts && a.zero_expert_output.present()) {
    return invalid("zero_expert_output: got one without zero experts, need none");
  }
  const DType ids = a.topk_ids.dtype;
  const bool custom = spec.method == RoutingMethod::kCustom;
  if (ids != DType::kI32 && (custom || (ids != DType::kI64 && ids != DType::kU32))) {
    return {StatusCode::kInvalidDType,
            fmt::format("topk_ids: got {}, need {}", dtype_name(ids),
                        custom ? "I32 with custom routing on a GPU" : "I32, I64 or U32")};
  }
  const std::int64_t tokens = a.router_logits.dim(0);
  const bool hash = spec.method == RoutingMethod::kHash;
  for (const Field& t :
       {Field{"router_logits", a.router_logits, {tokens, columns}, a.router_logits.dtype, true},
        Field{"topk_weights", a.topk_weights, {tokens, slots}, DType::kF32, true},
        Field{"topk_ids", a.topk_ids, {tokens, slots}, ids, true},
        Field{"input_ids", a.input_ids, {tokens}, DType::kI32, hash},
        Field{"padding_mask", a.padding_mask, {tokens}, DType::kU8, false}}) {
    MOESAIC_RETURN_IF_ERROR(check_field(t, device));
  }
  if (zero_experts) MOESAIC_RETURN_IF_ERROR(check_zero_experts(a, tokens, device));
  if (custom && a.hidden_states.present()) {
    const ConstTensorView& x = a.hidden_states;
    const Shape rows{tokens, x.rank() == 2 ? x.dim(1) : -1};
    MOESAIC_RETURN_IF_ERROR(check_field({"hidden_states", x, rows, x.dtype, true}, device));
  }
  struct Named {
    std::string_view field;
    ConstTensorView view;
  };
  // A workspace without bytes is not there.
  const auto workspace_bytes = static_cast<std::int64_t>(a.workspace.size());
  const Named written[] = {
      {"topk_weights", a.topk_weights},
      {"topk_ids", a.topk_ids},
      {"zero_expert_output",
       zero_experts ? ConstTensorView(a.zero_expert_output) : ConstTensorView()},
      {"workspace", {a.workspace.data(), DType::kU8, {workspace_bytes}, device}}};
  const Named read[] = {{"hidden_states", a.hidden_states},
                        {"router_logits", a.router_logits},
                        {"input_ids", a.input_ids},
                        {"padding_mask", a.padding_mask}};
  for (std::size_t i = 0; i < std::size(written); ++i) {
    for (std::size_t j = i + 1; j < std::size(written); ++j) {
      MOESAIC_RETURN_IF_ERROR(
          expect_no_overlap(written[i].field, written[i].view, written[j].field, written[j].view));
    }
    for (const Named& r : read) {
      MOESAIC_RETURN_IF_ERROR(
          expect_no_overlap(written[i].field, written[i].view, r.field, r.view));
    }
  }
  return {};
}

}  // namespace moesaic::router
