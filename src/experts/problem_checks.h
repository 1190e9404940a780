// Checks that every experts backend shares: of the problem, of one expert's weights, of the
// arguments of run. No arithmetic here. Texts give the field, the value found and the value needed.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "moesaic/experts.h"
#include "moesaic/status.h"

namespace moesaic {

// The arithmetic that a QuantScheme asks for. Taken from its operands, never from its name, so that
// a scheme put together by hand means the same. All accumulate in fp32.
enum class ComputeScheme : std::uint8_t {
  kF32,       // weights as stored (F32, BF16, F16, or e4m3 with block scales); fp32 arithmetic, no
              // rounding before the output
  kBF16,      // hidden states and intermediate rounded to bf16, weights bf16
  kF16,       // the same with f16
  kFp8Block,  // e4m3 weights with 128x128 scales; hidden states and intermediate rounded to
              // activation_dtype, then quantised to e4m3 per row and 128 columns (scales rounded up
              // to a power of two when their format is E8M0: a backend honours that or refuses)
  kFp8Bf16,   // the same weights; hidden states and intermediate rounded to bf16
};
std::string_view compute_scheme_name(ComputeScheme scheme);
// kUnsupported for any other pair of operands (the text says which operand and what is possible).
Result<ComputeScheme> compute_scheme(const QuantScheme& quant);

// The dtype that hidden states and the activation's result are rounded to before a GEMM reads them
// (or before they are quantised): F32 in the F32 scheme, activation_dtype in all others.
inline DType operand_dtype(const MoeProblem& problem, ComputeScheme scheme) {
  return scheme == ComputeScheme::kF32 ? DType::kF32 : problem.activation_dtype;
}

// Rows of w13: 2I (gated) or I.
inline std::int64_t w13_rows(const MoeProblem& problem) {
  return is_gated(problem.activation.kind) ? 2 * problem.intermediate_size
                                           : problem.intermediate_size;
}

inline constexpr std::int64_t kFp8Block = 128;  // rows and columns that share a weight scale

// Everything about a problem that no backend can compute, in this order: sizes and counts
// (kInvalidArgument, kLimitExceeded), activation constants (kInvalidArgument), weight on input with
// top_k > 1 (kInvalidArgument), the quantisation pair and activation_dtype (kUnsupported), block
// shapes (kUnsupported). Sizes are bounded so that every byte count of one expert fits 62 bits.
Status check_problem(const MoeProblem& problem);

// Shapes, dtypes, layout and finite scales of one expert, as ExpertWeightsView documents.
// kInvalidShape, kInvalidDType, kInvalidLayout (not contiguous), kInvalidArgument (absent or
// unexpected tensor, non-finite scale). The text starts with "expert <local_expert>: ".
Status check_expert_weights(const MoeProblem& problem, const ExpertWeightsView& weights,
                            std::int64_t local_expert);

// Arguments of Experts::run against the problem the backend was made for. The problem's format
// decides what must be present. Also checks every id (in [-1, E)), every map entry (in [-1, E_l)),
// every count (in [0, T]), that output and workspace overlap no input, and the workspace's
// alignment and size. O(M * top_k + E). Allocates nothing when it succeeds.
Status check_run_args(const MoeProblem& problem, const ExpertsArgs& args,
                      std::int64_t workspace_needed);

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

}  // namespace moesaic
