#include "prepare_finalize/call_checks.h"

#include <fmt/format.h>

#include <iterator>
#include <string_view>

#include "core/refusal.h"
#include "core/row_span.h"

namespace moesaic::prepare_finalize {
namespace {

// [M, H] of host memory in a float dtype; rows may lie apart.
Status check_matrix(std::string_view field, const ConstTensorView& t, std::int64_t hidden) {
  if (t.rank() != 2 || t.dim(1) != hidden) {
    return {StatusCode::kInvalidShape,
            fmt::format("{}: got {}, need [M, {}]", field, t.shape.to_string(), hidden)};
  }
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype(field, t.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_device(field, t, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, t, t.shape));
  if (t.dim(0) == 0) return {};
  if (t.dim(1) > 1 && t.strides[1] != 1) {
    return {StatusCode::kInvalidLayout,
            fmt::format("{}: got a stride of {} within rows, need 1", field, t.strides[1])};
  }
  if (t.dim(0) > 1 && t.strides[0] < 0) {
    return {StatusCode::kInvalidLayout,
            fmt::format("{}: got rows {} elements apart, need >= 0", field, t.strides[0])};
  }
  return row_span(field, t).status();
}

Status check_routing(const MoeProblem& p, std::int64_t tokens, const ConstTensorView& ids,
                     const ConstTensorView& weights, std::span<const std::int32_t> map) {
  struct Field {
    std::string_view name;
    const ConstTensorView& view;
    DType dtype;
  };
  for (const Field& t :
       {Field{"topk_ids", ids, DType::kI32}, Field{"topk_weights", weights, DType::kF32}}) {
    MOESAIC_RETURN_IF_ERROR(expect_dtype(t.name, t.view, t.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_shape(t.name, t.view, {tokens, p.top_k}));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(t.name, t.view));
    MOESAIC_RETURN_IF_ERROR(expect_device(t.name, t.view, Device::cpu()));
  }
  if (map.empty() ? p.num_local_experts == p.num_experts : std::ssize(map) == p.num_experts) {
    return {};
  }
  return {StatusCode::kInvalidShape,
          fmt::format("expert_map: got [{}], need [{}]", map.size(), p.num_experts)};
}

}  // namespace

Status check_prepare_args(const MoeProblem& problem, const PrepareArgs& args) {
  MOESAIC_RETURN_IF_ERROR(check_matrix("hidden_states", args.hidden_states, problem.hidden_size));
  return check_routing(problem, args.hidden_states.dim(0), args.topk_ids, args.topk_weights,
                       args.expert_map);
}

Status check_finalize_args(const MoeProblem& problem, const FinalizeArgs& args) {
  MOESAIC_RETURN_IF_ERROR(check_matrix("output", args.output, problem.hidden_size));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", args.output));
  const ConstTensorView& rows = args.expert_output;
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("expert_output", rows.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_device("expert_output", rows, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("expert_output", rows));
  // A view of rank 0 is none at all.
  if (rows.rank() > 0) {
    MOESAIC_RETURN_IF_ERROR(expect_shape("expert_output", rows, rows.shape));
  }
  if (args.reduction == TopKWeightAndReduce::kNoOp) return {};
  return check_routing(problem, args.output.dim(0), args.topk_ids, args.topk_weights,
                       args.expert_map);
}

}  // namespace moesaic::prepare_finalize
