// A call in the batched format on a GPU, as far as it can be checked without one: part of every
// build.
#include <fmt/format.h>

#include "core/refusal.h"
#include "experts/problem_checks.h"
#include "experts/sm90/catalogue_row.h"

namespace moesaic::cuda {
namespace {

// Scales [E_l, T, groups] that lie group by group, rows of a group side by side.
Status check_slab_scales(const MoeProblem& p, const ConstTensorView& scale, const Shape& rows) {
  if (p.quant.kind != ComputeScheme::kFp8Block) {
    return unsupported(
        fmt::format("hidden_scale: got rows that were quantised elsewhere for {}, need bf16 rows",
                    compute_scheme_name(p.quant.kind)));
  }
  const std::int64_t tokens = rows[1], all = rows[0] * tokens;
  MOESAIC_RETURN_IF_ERROR(expect_dtype("hidden_scale", scale, DType::kF32));
  MOESAIC_RETURN_IF_ERROR(
      expect_shape("hidden_scale", scale, {rows[0], tokens, (p.hidden_size + 127) / 128}));
  MOESAIC_RETURN_IF_ERROR(expect_device("hidden_scale", scale, p.device));
  if (scale.strides[0] == tokens && scale.strides[1] == 1 && scale.strides[2] >= all) return {};
  return {StatusCode::kInvalidLayout,
          fmt::format("hidden_scale: got strides [{}, {}, {}], need [{}, 1, {} or more]",
                      scale.strides[0], scale.strides[1], scale.strides[2], tokens, all)};
}

}  // namespace

Status check_slab_args(const MoeProblem& p, const ExpertsArgs& a, bool any_rows) {
  const std::int64_t tokens = a.hidden_states.rank() == 3 ? a.hidden_states.dim(1) : -1;
  const Shape rows{p.num_local_experts, tokens, p.hidden_size};
  if (!(a.hidden_states.shape == rows)) {
    return {StatusCode::kInvalidShape,
            fmt::format("hidden_states: got {}, need [{}, T, {}]",
                        a.hidden_states.shape.to_string(), p.num_local_experts, p.hidden_size)};
  }
  if (tokens > p.max_tokens) {
    return {StatusCode::kLimitExceeded,
            fmt::format("hidden_states: got slabs of {} rows, planned for at most {}", tokens,
                        p.max_tokens)};
  }
  const bool codes = a.hidden_scale.present();
  if (codes) MOESAIC_RETURN_IF_ERROR(check_slab_scales(p, a.hidden_scale, rows));
  if (codes || !any_rows) {
    const DType in = codes ? DType::kF8E4M3 : DType::kBF16;
    MOESAIC_RETURN_IF_ERROR(expect_dtype("hidden_states", a.hidden_states, in));
  }
  if (!any_rows) MOESAIC_RETURN_IF_ERROR(expect_dtype("output", a.output, DType::kBF16));
  if (!codes) MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", a.hidden_states.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("output", a.output.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", a.output, rows));
  for (const auto& [field, view] : {std::pair{"hidden_states", a.hidden_states},
                                    std::pair{"output", ConstTensorView(a.output)}}) {
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, view));
    MOESAIC_RETURN_IF_ERROR(expect_device(field, view, p.device));
  }
  if (std::ssize(a.expert_num_tokens) != p.num_local_experts) {
    return {StatusCode::kInvalidShape,
            fmt::format("expert_num_tokens: got [{}], need [{}]", a.expert_num_tokens.size(),
                        p.num_local_experts)};
  }
  if (!a.numerics.empty()) {
    return unsupported("numerics: got rows in the batched format, need rows [M, H]");
  }
  MOESAIC_RETURN_IF_ERROR(experts::check_call_scales(p, a.a1_scale, a.a2_scale));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("output", a.output, "hidden_states", a.hidden_states));
  return expect_disjoint_args(p, a);
}

}  // namespace moesaic::cuda
