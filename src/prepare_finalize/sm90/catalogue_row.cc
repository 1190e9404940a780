// What of the sm_90 transports is decided without a device: part of every build.
#include "prepare_finalize/sm90/catalogue_row.h"

#include <fmt/format.h>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "permute/sm90/align.h"
#include "prepare_finalize/predicates.h"
#include "quant/compute_scheme.h"

namespace moesaic::cuda {
namespace {

// Of the hidden size of rows that travel as they are: vectors of 16 bytes, whole FP8 groups.
std::int64_t multiple_of(const MoeProblem& problem) { return travels_as_codes(problem) ? 128 : 8; }

}  // namespace

DType row_dtype(const MoeProblem& problem) {
  return quant::operand_dtype(problem.activation_dtype, problem.quant.kind);
}

std::string_view row_name(DType row) {
  return row == DType::kBF16 ? "bf16" : row == DType::kF16 ? "fp16" : "fp32";
}

bool travels_as_codes(const MoeProblem& problem) {
  // A row is quantised once for all of its experts: not times the weight of each.
  const bool weighted = problem.apply_router_weight_on_input && problem.top_k > 1;
  if (weighted && !MOESAIC_FAULT(cuda_codes_travel_with_one_weight)) return false;
  return problem.quant.kind == ComputeScheme::kFp8Block && row_dtype(problem) == DType::kBF16;
}

Status sm90_transport_can_implement(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::standard_transport_can_implement(problem));
  if (problem.device.is_cuda()) return {};
  return unsupported(fmt::format("device: {}, need a Hopper GPU", problem.device.to_string()));
}

MoeProblem carried_problem(const MoeProblem& problem) {
  MoeProblem carried = problem;
  if (problem.hidden_size % multiple_of(problem) == 0) return carried;
  if (row_dtype(problem) == DType::kBF16) carried.quant = quant_scheme_from_name("bf16").value();
  carried.hidden_size = round_up(problem.hidden_size, std::int64_t{8});
  return carried;
}

Status sm90_rows_can_travel(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(sm90_transport_can_implement(problem));
  if (problem.hidden_size % multiple_of(problem) == 0) return {};
  return unsupported(fmt::format("hidden_size: got {}, need a multiple of {}", problem.hidden_size,
                                 multiple_of(problem)));
}

Status sm90_slabs_can_travel(const MoeProblem& problem) {
  MOESAIC_RETURN_IF_ERROR(prepare_finalize::batched_transport_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(sm90_batched_can_implement(problem));
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
