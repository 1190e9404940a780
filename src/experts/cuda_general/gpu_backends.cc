#include "experts/cuda_general/gpu_backends.h"

#include <fmt/format.h>

#include <string>

#include "core/refusal.h"
#include "experts/cuda_general/general_experts.h"
#include "experts/cuda_general/general_plan.h"

namespace moesaic::cuda {
namespace {

#if MOESAIC_HAS_CUDA
Result<std::unique_ptr<GpuExperts>> make_sm90(const MoeProblem& problem, ExpertSource& source,
                                              int device) {
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<CudaExperts> made,
                           CudaExperts::create(problem, source, device));
  return std::unique_ptr<GpuExperts>(std::move(made));
}
constexpr auto kMakeSm90 = &make_sm90;
constexpr auto kMakeGeneral = &make_general_gpu_experts;
#else
constexpr decltype(GpuBackend::create) kMakeSm90 = nullptr, kMakeGeneral = nullptr;
#endif

constexpr GpuBackend kBackends[] = {
    {kCudaExpertsName, kCudaExpertsDeterminism, &CudaExperts::takes_any_rows_of,
     &CudaExperts::can_implement, &CudaExperts::workspace_size, kMakeSm90},
    {kGeneralExpertsName, kGeneralExpertsDeterminism, [](const MoeProblem&) { return true; },
     &general_experts_take, &general_workspace_size, kMakeGeneral},
};

}  // namespace

std::span<const GpuBackend> gpu_backends() { return kBackends; }

Result<const GpuBackend*> choose_gpu_backend(const MoeProblem& problem, std::string_view forced) {
  // A problem that makes no sense has one reason, not one per row.
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  std::string reasons, names;
  for (const GpuBackend& row : kBackends) {
    names += fmt::format("{}{}", names.empty() ? "" : " or ", row.name);
    if (!forced.empty() && row.name != forced) continue;
    const Status status = row.can_implement(problem);
    if (status.ok()) return &row;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", row.name, status.message());
  }
  if (!reasons.empty()) return Status(unsupported(reasons));
  return Status(unsupported(fmt::format("backend: got {} for {}, need {}", forced.substr(0, 64),
                                        problem.device.to_string(), names)));
}

}  // namespace moesaic::cuda
