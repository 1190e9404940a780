// Checks that every experts backend shares: of the problem, of one expert's weights, of the
// arguments of run. No arithmetic here. Texts give the field, the value found and the value needed.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "moesaic/experts.h"
#include "moesaic/status.h"
#include "quant/compute_scheme.h"

namespace moesaic::experts {

// Rows of w13: 2I (gated) or I.
inline std::int64_t w13_rows(const MoeProblem& problem) {
  return is_gated(problem.activation.kind) ? 2 * problem.intermediate_size
                                           : problem.intermediate_size;
}
// Equal parts of w13 within which blocks of rows are counted.
inline std::int64_t w13_parts(const MoeProblem& problem) {
  return is_gated(problem.activation.kind) ? 2 : 1;
}

// Shapes, dtypes, layout and finite scales of one expert, as ExpertWeightsView documents.
// kInvalidShape, kInvalidDType, kInvalidLayout (not contiguous), kInvalidArgument (absent or
// unexpected tensor, non-finite scale, memory of a GPU for a problem on the CPU). The text starts
// with "expert <local_expert>: ".
Status check_expert_weights(const MoeProblem& problem, const ExpertWeightsView& weights,
                            std::int64_t local_expert);

// Arguments of Experts::run against the problem the backend was made for. The problem's format
// decides what must be present. Also checks every id (in [-1, E)), every map entry (in [-1, E_l)),
// every count (in [0, T]), that output and workspace overlap no input, and the workspace's
// alignment and size. O(M * top_k + E). Allocates nothing when it succeeds.
Status check_run_args(const MoeProblem& problem, const ExpertsArgs& args,
                      std::int64_t workspace_needed);

// Static activation scales of a call (ExpertsArgs::a1_scale, a2_scale): kUnsupported where the
// scheme has none, kInvalidDType, kInvalidShape, kInvalidLayout, kInvalidArgument (a value that is
// not finite and above 0). Reads host memory.
Status check_call_scales(const MoeProblem& problem, const ConstTensorView& a1_scale,
                         const ConstTensorView& a2_scale);

// M (standard) or T (batched) of arguments that passed their rank check.
inline std::int64_t tokens_of(const MoeProblem& problem, const ExpertsArgs& args) {
  return args.hidden_states.dim(problem.format == ActivationFormat::kStandard ? 0 : 1);
}

// Rows must be dense (last stride 1) and strides non-negative; `bytes` becomes the distance from
// the first byte to one past the last. kInvalidLayout, kLimitExceeded.
Result<std::int64_t> strided_extent_bytes(std::string_view field, const ConstTensorView& t);

// kAliasing (names both) when [a, a + bytes_a) and [b, b + bytes_b) intersect.
Status expect_disjoint(std::string_view field_a, const void* a, std::int64_t bytes_a,
                       std::string_view field_b, const void* b, std::int64_t bytes_b);

}  // namespace moesaic::experts
