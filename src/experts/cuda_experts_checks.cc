// What the GPU experts take and need, decided without a device: part of every build.
#include <fmt/format.h>

#include <utility>

#include "core/arena.h"
#include "core/checked.h"
#include "core/refusal.h"
#include "experts/cuda_experts.h"
#include "experts/cuda_experts_plan.h"
#include "experts/problem_checks.h"
#include "permute/cuda_align.h"

namespace moesaic::cuda {
Status CudaExperts::can_implement(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  MOESAIC_ASSIGN_OR_RETURN(const ComputeScheme scheme, compute_scheme(problem.quant));
  if (scheme != ComputeScheme::kBF16 && scheme != ComputeScheme::kFp8Block) {
    return unsupported(
        fmt::format("scheme: got {}, need bf16 or fp8-block", compute_scheme_name(scheme)));
  }
  if (problem.activation_dtype != DType::kBF16) {
    return unsupported(
        fmt::format("activation_dtype: got {}, need BF16", dtype_name(problem.activation_dtype)));
  }
  if (problem.format != ActivationFormat::kStandard) {
    return unsupported("format: got batched, need standard");
  }
  const std::int64_t multiple = scheme == ComputeScheme::kFp8Block ? 128 : 8;
  for (const auto& [name, value] : {std::pair{"hidden_size", problem.hidden_size},
                                    std::pair{"intermediate_size", problem.intermediate_size}}) {
    if (value % multiple != 0) {
      return unsupported(fmt::format("{}: got {}, need a multiple of {}", name, value, multiple));
    }
  }
  if (problem.num_local_experts > kMaxAlignedExperts) {
    return unsupported(fmt::format("num_local_experts: got {}, need at most {}",
                                   problem.num_local_experts, kMaxAlignedExperts));
  }
  const auto pairs = checked_mul(problem.max_tokens, problem.top_k);
  if (!pairs || *pairs > (std::int64_t{1} << 30)) {
    return unsupported(fmt::format("max_tokens: got {} of {} experts each, need at most 2^30 pairs",
                                   problem.max_tokens, problem.top_k));
  }
  return {};
}

Result<std::int64_t> CudaExperts::workspace_size(const MoeProblem& problem, std::int64_t tokens) {
  if (tokens < 0) {
    return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
  }
  MOESAIC_RETURN_IF_ERROR(can_implement(problem));
  Arena arena = Arena::measure();
  ExpertsWorkspace::carve(problem, make_experts_plan(problem), tokens, arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return arena.used();
}

}  // namespace moesaic::cuda
