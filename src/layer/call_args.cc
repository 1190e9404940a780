#include "layer/call_args.h"

#include <fmt/format.h>

#include <array>
#include <limits>
#include <string_view>
#include <utility>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "experts/problem_checks.h"
#include "layer/rows.h"

namespace moesaic::layer {
namespace {

// [B, T, H] whose rows are equally far apart as [B * T, H].
template <class Byte>
Result<BasicTensorView<Byte>> as_matrix(std::string_view field, const BasicTensorView<Byte>& t) {
  if (t.rank() != 3) return t;
  if (t.dim(0) < 0 || t.dim(1) < 0 || t.dim(2) < 0) {  // two of them make a product that passes
    return Status(StatusCode::kInvalidShape,
                  fmt::format("{}: got {}, need dimensions >= 0", field, t.shape.to_string()));
  }
  const auto rows = checked_mul(t.dim(0), t.dim(1));
  if (!rows)
    return Status(StatusCode::kLimitExceeded, fmt::format("{}: rows exceed 2^63-1", field));
  // Of one row (or none) only the last stride means something.
  const std::int64_t apart = t.dim(1) > 1 ? t.strides[1] : t.strides[0];
  if (t.dim(0) > 1 && t.dim(1) > 1 && t.strides[0] != t.dim(1) * t.strides[1]) {
    return Status(StatusCode::kInvalidLayout,
                  fmt::format("{}: got strides {}, {} of {}, need rows equally far apart", field,
                              t.strides[0], t.strides[1], t.shape.to_string()));
  }
  BasicTensorView<Byte> matrix = t;
  matrix.shape = Shape{*rows, t.dim(2)};
  matrix.strides = {apart, t.strides[2]};
  return matrix;
}

struct Named {
  std::string_view field;
  ConstTensorView view;
};

Status check_presence(const FusedPlan& plan, const FusedMoE::Args& a) {
  const bool ids = a.topk_ids.present();
  if (ids != a.topk_weights.present()) {
    return invalid(fmt::format("{}: got none with {}, need both or neither",
                               ids ? "topk_weights" : "topk_ids",
                               ids ? "topk_ids" : "topk_weights"));
  }
  if (ids && a.router_logits.present()) {
    return invalid("router_logits: got some with topk_ids, need the one or the other");
  }
  if (ids && a.trace.router_logits.present()) {
    return invalid("trace.router_logits: got one with given topk_ids, which have no logits");
  }
  if (ids || a.hidden_states.dim(0) == 0) return {};
  if (!plan.has_gate && !a.router_logits.present()) {
    return invalid(
        "router_logits: got none, and the layer has no gate (include_gate = false); need them, or "
        "topk_weights and topk_ids");
  }
  if (plan.routing.method == RoutingMethod::kHash && !a.input_ids.present()) {
    return invalid(
        "input_ids: got none, and the layer chooses experts by token id (routing method hash); "
        "need them, or topk_weights and topk_ids");
  }
  return {};
}

Status check_ids_dtype(const ConstTensorView& ids) {
  if (!ids.present() || ids.dtype == DType::kI32 || ids.dtype == DType::kI64 ||
      ids.dtype == DType::kU32) {
    return {};
  }
  return {StatusCode::kInvalidDType,
          fmt::format("topk_ids: got {}, need I32, I64 or U32", dtype_name(ids.dtype))};
}

}  // namespace

Result<FusedMoE::Args> as_matrices(const FusedMoE::Args& args) {
  FusedMoE::Args a = args;
  MOESAIC_ASSIGN_OR_RETURN(a.hidden_states, as_matrix("hidden_states", args.hidden_states));
  if (args.hidden_states.rank() != 3) return a;
  const Shape& x = args.hidden_states.shape;
  // All have three dimensions, or an output is the matrix.
  const auto flatten = [&](std::string_view field, TensorView& t) -> Status {
    if (t.rank() != 3) return {};
    MOESAIC_RETURN_IF_ERROR(expect_shape(field, t, x));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, t));
    MOESAIC_ASSIGN_OR_RETURN(t, as_matrix(field, t));
    return {};
  };
  MOESAIC_RETURN_IF_ERROR(flatten("output", a.output));
  if (a.shared_output.present()) {
    MOESAIC_RETURN_IF_ERROR(flatten("shared_output", a.shared_output));
  }
  return a;
}

Status check_routing(const FusedPlan& plan, const FusedMoE::Args& a, Device device) {
  MOESAIC_RETURN_IF_ERROR(check_presence(plan, a));
  if (!a.router_logits.present() && !a.topk_ids.present()) {
    MOESAIC_RETURN_IF_ERROR(gate::check_linear_input(a.hidden_states.dtype, plan.logit_rounding()));
  }
  const std::int64_t rows = a.hidden_states.dim(0);
  const RoutingSpec& r = plan.routing;
  if (a.router_logits.present()) {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("router_logits", a.router_logits.dtype));
    MOESAIC_RETURN_IF_ERROR(
        expect_shape("router_logits", a.router_logits, {rows, r.num_experts + r.num_zero_experts}));
  }
  MOESAIC_RETURN_IF_ERROR(check_ids_dtype(a.topk_ids));
  for (const auto& [field, view] :
       {Named{"topk_weights", a.topk_weights}, Named{"topk_ids", a.topk_ids}}) {
    if (view.present()) MOESAIC_RETURN_IF_ERROR(expect_shape(field, view, {rows, r.top_k}));
  }
  struct Typed {
    std::string_view field;
    const ConstTensorView& view;
    DType dtype;
  };
  for (const auto& [field, view, dtype] : {Typed{"topk_weights", a.topk_weights, DType::kF32},
                                           Typed{"input_ids", a.input_ids, DType::kI32},
                                           Typed{"padding_mask", a.padding_mask, DType::kU8}}) {
    if (view.present()) MOESAIC_RETURN_IF_ERROR(expect_dtype(field, view, dtype));
  }
  for (const auto& [field, view] :
       {Named{"input_ids", a.input_ids}, Named{"padding_mask", a.padding_mask}}) {
    if (view.present()) MOESAIC_RETURN_IF_ERROR(expect_shape(field, view, {rows}));
  }
  for (const auto& [field, view] :
       {Named{"router_logits", a.router_logits}, Named{"topk_weights", a.topk_weights},
        Named{"topk_ids", a.topk_ids}, Named{"input_ids", a.input_ids},
        Named{"padding_mask", a.padding_mask}}) {
    if (!view.present()) continue;
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, view));
    MOESAIC_RETURN_IF_ERROR(expect_device(field, view, device));
    for (const auto& [out, written] :
         {Named{"output", a.output}, Named{"shared_output", a.shared_output},
          Named{"trace.router_logits", a.trace.router_logits},
          Named{"trace.topk_weights", a.trace.topk_weights},
          Named{"trace.topk_ids", a.trace.topk_ids}}) {
      if (written.present()) MOESAIC_RETURN_IF_ERROR(expect_no_overlap(out, written, field, view));
    }
  }
  return {};
}

Status check_traces_apart(const FusedMoE::Args& a) {
  const std::array traces = {Named{"trace.router_logits", a.trace.router_logits},
                             Named{"trace.topk_weights", a.trace.topk_weights},
                             Named{"trace.topk_ids", a.trace.topk_ids}};
  // Rows that lie apart: from the first to the last.
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t input_bytes,
                           experts::strided_extent_bytes("hidden_states", a.hidden_states));
  for (std::size_t i = 0; i < traces.size(); ++i) {
    const auto& [field, t] = traces[i];
    if (!t.present() || MOESAIC_FAULT(layer_traces_may_overlap)) continue;
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(t.dtype, t.shape));
    MOESAIC_RETURN_IF_ERROR(experts::expect_disjoint(field, t.data, bytes, "hidden_states",
                                                     a.hidden_states.data, input_bytes));
    MOESAIC_RETURN_IF_ERROR(expect_no_overlap(field, t, "output", a.output));
    MOESAIC_RETURN_IF_ERROR(expect_no_overlap(field, t, "shared_output", a.shared_output));
    for (std::size_t j = 0; j < i; ++j) {
      MOESAIC_RETURN_IF_ERROR(expect_no_overlap(field, t, traces[j].field, traces[j].view));
    }
  }
  return {};
}

Status check_shared_output(const FusedPlan& plan, const FusedMoE::Args& args, Device device) {
  const TensorView& t = args.shared_output;
  if (!t.present()) return {};
  if (!plan.adds_shared) {
    return invalid("shared_output: got one, but there are no shared experts that this rank adds");
  }
  if (plan.shared_slices > 1 && plan.routed.device.is_cuda() && t.dtype == DType::kBF16) {
    return unsupported(
        "shared_output: got BF16 of slices on a GPU, need F32, in which they are added");
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape("shared_output", t, args.output.shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("shared_output", t));
  return expect_device("shared_output", t, device);
}

std::int64_t id_at(const ConstTensorView& topk_ids, std::int64_t i) {
  if (topk_ids.dtype == DType::kI64) return topk_ids.as<std::int64_t>()[i];
  if (topk_ids.dtype == DType::kU32) return topk_ids.as<std::uint32_t>()[i];
  return topk_ids.as<std::int32_t>()[i];
}

bool is_padding(const FusedMoE::Args& args, std::int64_t t) {
  return args.padding_mask.present() && args.padding_mask.as<std::uint8_t>()[t] != 0;
}

void forget_padding(const FusedMoE::Args& args) {
  const std::span<RowNumerics> numerics = args.trace.numerics;
  for (std::size_t t = 0; t < numerics.size(); ++t) {
    if (is_padding(args, static_cast<std::int64_t>(t)) && !MOESAIC_FAULT(layer_padding_is_measured))
      numerics[t] = {};
  }
}

namespace {

// Slabs hold a row of a token once for each expert. Copies of an expert would take one each, but
// what is refused does not depend on where experts are today.
Status check_distinct(const FusedPlan& plan, const ConstTensorView& topk_ids, std::int64_t t) {
  const std::int64_t k = plan.routing.top_k;
  for (std::int64_t j = 1; j < k; ++j) {
    const std::int64_t id = id_at(topk_ids, t * k + j);
    if (id < 0 || id >= plan.routing.num_experts) continue;
    for (std::int64_t i = 0; i < j; ++i) {
      if (id_at(topk_ids, t * k + i) != id) continue;
      return invalid(
          fmt::format("topk_ids: got expert {} twice at [{}, {}] and [{}, {}], transport batched "
                      "needs distinct experts",
                      id, t, i, t, j));
    }
  }
  return {};
}

}  // namespace

Status check_routing_values(const FusedPlan& plan, const FusedMoE::Args& a) {
  const std::int64_t rows = a.hidden_states.dim(0), k = plan.routing.top_k;
  const bool given = a.topk_ids.present() && !MOESAIC_FAULT(layer_given_ids_unchecked);
  const std::int64_t columns = plan.routing.num_experts + plan.routing.num_zero_experts;
  const bool tokens = !a.topk_ids.present() && plan.routing.method == RoutingMethod::kHash;
  if (!given && !tokens) return {};
  const bool slabs = plan.ranks.transport == RankTransport::kBatched &&
                     !MOESAIC_FAULT(layer_copies_may_share_a_row);
  for (std::int64_t t = 0; t < rows; ++t) {
    if (is_padding(a, t)) continue;  // whatever stands there
    for (std::int64_t j = 0; given && j < k; ++j) {
      const std::int64_t id = id_at(a.topk_ids, t * k + j);
      if (id >= -1 && id < columns) continue;
      return invalid(
          fmt::format("topk_ids: got {} at [{}, {}], need -1 to {}", id, t, j, columns - 1));
    }
    if (given && slabs) MOESAIC_RETURN_IF_ERROR(check_distinct(plan, a.topk_ids, t));
    if (!tokens) continue;
    const std::int64_t id = a.input_ids.as<std::int32_t>()[t];
    if (id >= 0 && id < plan.hash_vocabulary) continue;
    return invalid(fmt::format("input_ids: got {} at [{}], need 0 to {} (rows of the hash table)",
                               id, t, plan.hash_vocabulary - 1));
  }
  return {};
}

FusedMoE::Args rows_of_call(const FusedMoE::Args& args, std::int64_t first, std::int64_t count) {
  FusedMoE::Args part = args;
  const auto cut = [&](auto& t) {
    if (t.present() && t.rank() == 2) t = rows_of(t, first, count);
  };
  part.hidden_states = rows_of(args.hidden_states, first, count);
  part.output = rows_of(args.output, first, count);
  cut(part.shared_output);
  cut(part.router_logits);
  cut(part.topk_weights);
  cut(part.topk_ids);
  cut(part.trace.router_logits);
  cut(part.trace.topk_weights);
  cut(part.trace.topk_ids);
  for (ConstTensorView* t : {&part.input_ids, &part.padding_mask}) {
    if (!t->present()) continue;
    t->data += first * (dtype_bits(t->dtype) / 8);
    t->shape = Shape{count};
  }
  if (!args.trace.numerics.empty()) {
    part.trace.numerics = args.trace.numerics.subspan(static_cast<std::size_t>(first),
                                                      static_cast<std::size_t>(count));
  }
  return part;
}

}  // namespace moesaic::layer
