// What of the experts of GPUs is decided without a device: part of every build.
#include "experts/sm90/catalogue_row.h"

#include <fmt/format.h>

#include "core/refusal.h"
#include "cuda/dense_rows.h"
#include "experts/cuda_general/general_plan.h"
#include "experts/problem_checks.h"
#include "experts/sm90/experts.h"

namespace moesaic::cuda {

namespace {

Status expect_hopper(const MoeProblem& problem) {
  if (problem.device.is_cuda()) return {};
  return unsupported(fmt::format("device: {}, need a Hopper GPU", problem.device.to_string()));
}

}  // namespace

Status sm90_experts_can_implement(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(CudaExperts::can_implement(problem));
  return expect_hopper(problem);
}

Result<std::int64_t> sm90_experts_workspace_size(const MoeProblem& problem, std::int64_t tokens) {
  MOESAIC_RETURN_IF_ERROR(sm90_experts_can_implement(problem));
  return CudaExperts::workspace_size(problem, tokens);
}

Status general_experts_can_implement(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(general_experts_take(problem));
  return expect_hopper(problem);
}

Result<std::int64_t> general_experts_workspace_size(const MoeProblem& problem,
                                                    std::int64_t tokens) {
  MOESAIC_RETURN_IF_ERROR(general_experts_can_implement(problem));
  return general_workspace_size(problem, tokens);
}

Status expect_disjoint_args(const MoeProblem& p, const ExpertsArgs& a) {
  const TensorView workspace(a.workspace.data(), DType::kU8, {std::ssize(a.workspace)}, p.device);
  const auto of_ints = [&](std::span<const std::int32_t> ints) {
    return ConstTensorView(reinterpret_cast<const std::byte*>(ints.data()), DType::kI32,
                           {std::ssize(ints)}, p.device);
  };
  const ConstTensorView rows =
      p.format == ActivationFormat::kBatched ? a.hidden_states : rows_extent(a.hidden_states);
  for (const auto& [field, view] :
       {std::pair{"hidden_scale", a.hidden_scale}, std::pair{"topk_ids", a.topk_ids},
        std::pair{"topk_weights", a.topk_weights}, std::pair{"expert_map", of_ints(a.expert_map)},
        std::pair{"expert_num_tokens", of_ints(a.expert_num_tokens)},
        std::pair{"a1_scale", a.a1_scale}, std::pair{"a2_scale", a.a2_scale}}) {
    MOESAIC_RETURN_IF_ERROR(expect_no_overlap("output", a.output, field, view));
    MOESAIC_RETURN_IF_ERROR(expect_no_overlap("workspace", workspace, field, view));
  }
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("workspace", workspace, "hidden_states", rows));
  return expect_no_overlap("workspace", workspace, "output", a.output);
}

Status check_sm90_args(const MoeProblem& p, const ExpertsArgs& a, bool any_rows) {
  if (p.format == ActivationFormat::kBatched) return check_slab_args(p, a, any_rows);
  if (a.hidden_states.rank() != 2) {
    return {StatusCode::kInvalidShape,
            fmt::format("hidden_states: got {}, need [M, {}]", a.hidden_states.shape.to_string(),
                        p.hidden_size)};
  }
  const std::int64_t tokens = a.hidden_states.dim(0);
  const Shape rows{tokens, p.hidden_size}, slots{tokens, p.top_k};
  struct Field {
    std::string_view field;
    ConstTensorView view;
    Shape shape;
    DType dtype;
  };
  const bool codes = a.hidden_scale.present();
  if (codes) {
    const std::int64_t groups = (p.hidden_size + 127) / 128, stride = a.hidden_scale.strides[1];
    if (p.quant.kind != ComputeScheme::kFp8Block) {
      return unsupported(
          fmt::format("hidden_scale: got rows that were quantised elsewhere for {}, need bf16 rows",
                      compute_scheme_name(p.quant.kind)));
    }
    MOESAIC_RETURN_IF_ERROR(expect_dtype("hidden_scale", a.hidden_scale, DType::kF32));
    MOESAIC_RETURN_IF_ERROR(expect_shape("hidden_scale", a.hidden_scale, {tokens, groups}));
    MOESAIC_RETURN_IF_ERROR(expect_device("hidden_scale", a.hidden_scale, p.device));
    if (a.hidden_scale.strides[0] != 1 || stride < tokens) {
      return {StatusCode::kInvalidLayout,
              fmt::format("hidden_scale: got strides [{}, {}], need [1, {} or more]",
                          a.hidden_scale.strides[0], stride, tokens)};
    }
  }
  DType in = DType::kBF16, out = a.output.dtype == DType::kF32 ? DType::kF32 : DType::kBF16;
  if (any_rows) {
    if (!codes) MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", a.hidden_states.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("output", a.output.dtype));
    in = a.hidden_states.dtype;
    out = a.output.dtype;
  }
  for (const Field& t :
       {Field{"hidden_states", a.hidden_states, rows, codes ? DType::kF8E4M3 : in},
        Field{"output", a.output, rows, out}, Field{"topk_ids", a.topk_ids, slots, DType::kI32},
        Field{"topk_weights", a.topk_weights, slots, DType::kF32}}) {
    MOESAIC_RETURN_IF_ERROR(expect_dtype(t.field, t.view, t.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_shape(t.field, t.view, t.shape));
    MOESAIC_RETURN_IF_ERROR(t.field == "hidden_states" ? expect_rows(t.field, t.view)
                                                       : expect_contiguous(t.field, t.view));
    MOESAIC_RETURN_IF_ERROR(expect_device(t.field, t.view, p.device));
  }
  const auto map = static_cast<std::int64_t>(a.expert_map.size());
  if (map != p.num_experts && (map != 0 || p.num_local_experts != p.num_experts)) {
    return {StatusCode::kInvalidShape,
            fmt::format("expert_map: got [{}], need [{}]{}", map, p.num_experts,
                        map == 0 ? " where not all are local" : "")};
  }
  if (codes && !a.numerics.empty()) {
    return unsupported("numerics: got rows that were quantised elsewhere, need bf16 rows");
  }
  MOESAIC_RETURN_IF_ERROR(experts::check_call_scales(p, a.a1_scale, a.a2_scale));
  if (!a.numerics.empty() && static_cast<std::int64_t>(a.numerics.size()) != tokens) {
    return {StatusCode::kInvalidShape,
            fmt::format("numerics: got [{}], need [{}], one per row", a.numerics.size(), tokens)};
  }
  const bool same = a.inplace && a.output.data == a.hidden_states.data &&
                    a.output.dtype == a.hidden_states.dtype && a.hidden_states.is_contiguous();
  if (same && !a.numerics.empty()) {
    return unsupported(
        "numerics: got some with the output in place of hidden_states, need another");
  }
  if (!same) {
    MOESAIC_RETURN_IF_ERROR(
        expect_no_overlap("output", a.output, "hidden_states", rows_extent(a.hidden_states)));
  }
  return expect_disjoint_args(p, a);
}

}  // namespace moesaic::cuda
