// The plain reference of the experts stage: scalar loops over tokens, slots, rows and columns. It
// is the last row of the catalogue and the definition that fast backends are compared with.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "moesaic/experts.h"

namespace moesaic::experts {

// For every (token, slot) with a local expert e, x being the row rounded once to the operand dtype
// A (F32 in the F32 scheme, activation_dtype in the others):
//   weight on input   x = round_A(x * round_A(w)), and the weight is 1 from here on
//   GEMM1             g = x . w13[e]^T + b13[e]             fp32, fixed order
//   activation        y = round_A(act(g))                   fp32 inside, one rounding
//   GEMM2             z = y . w2[e]^T + b2[e]               fp32, fixed order
//   combine           out[t] += w * z in slot order         fp32; one rounding to the output dtype
// fp8-block: x and y are quantised after their rounding to A, per row and 128 columns
// (s = max(absmax, 1e-10) / 448, q = e4m3(x / s)), and each 128-column partial sum of products is
// multiplied by (s_x * s_w) before it is added. fp8 weights without activation quantisation: the
// same with s_x = 1. Rows without a local expert are zero; slots with id -1 are skipped.
// Batched: the same per row without weights (a weight on input was applied by prepare).
//
// Error against exact arithmetic on the same operands: <= (K / 8 + 8) * 2^-24 * sum |x*w| for each
// dot product of length K. Deterministic: the bits of a row depend on that row, its ids and weights
// only.
Status ref_experts_can_implement(const MoeProblem& problem);
// Copies the weights as they are stored. Errors as check_expert_weights and the source.
Result<std::unique_ptr<Experts>> make_ref_experts(const MoeProblem& problem, ExpertSource& source);
Result<std::int64_t> ref_experts_workspace_size(const MoeProblem& problem, std::int64_t tokens);
inline constexpr std::string_view kRefExpertsDeterminism =
    "bits of a row depend on that row, its ids and weights only";

}  // namespace moesaic::experts
