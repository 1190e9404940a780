// What of the sm_90 transports is decided without a device: part of every build.
#include "prepare_finalize/sm90/catalogue_row.h"

#include <fmt/format.h>

#include "core/checked.h"
#include "core/refusal.h"
#include "permute/sm90/align.h"
#include "prepare_finalize/predicates.h"

namespace moesaic::cuda {

Status sm90_transport_can_implement(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::standard_transport_can_implement(problem));
  if (problem.activation_dtype != DType::kBF16) {
    return unsupported(
        fmt::format("activation_dtype: got {}, need BF16", dtype_name(problem.activation_dtype)));
  }
  const std::int64_t multiple = problem.quant.kind == ComputeScheme::kFp8Block ? 128 : 8;
  if (problem.hidden_size % multiple != 0) {
    return unsupported(
        fmt::format("hidden_size: got {}, need a multiple of {}", problem.hidden_size, multiple));
  }
  if (problem.device.is_cuda()) return {};
  return unsupported(fmt::format("device: {}, need a Hopper GPU", problem.device.to_string()));
}

Status sm90_batched_can_implement(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::batched_can_implement(problem));
  if (problem.num_local_experts > kMaxAlignedExperts) {
    return unsupported(fmt::format("num_local_experts: got {}, need at most {}",
                                   problem.num_local_experts, kMaxAlignedExperts));
  }
  const auto rows = checked_mul(problem.max_tokens, problem.num_local_experts);
  if (rows && *rows <= std::int64_t{1} << 30) return {};
  return unsupported(
      fmt::format("max_tokens: got {} rows for each of {} local experts, need at most 2^30 rows",
                  problem.max_tokens, problem.num_local_experts));
}

}  // namespace moesaic::cuda
