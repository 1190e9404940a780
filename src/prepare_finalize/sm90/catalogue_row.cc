// What of the sm_90 transports is decided without a device: part of every build.
#include "prepare_finalize/sm90/catalogue_row.h"

#include <fmt/format.h>

#include "core/refusal.h"
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

}  // namespace moesaic::cuda
