// The experts of GPUs in the order of their catalogue, for whoever calls them on device memory: the
// layer's engine and the rows of experts_catalogue().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "experts/sm90/experts.h"

namespace moesaic::cuda {

struct GpuBackend {
  std::string_view name, determinism;
  // Rows of BF16, F16 and F32, slots in F32 (GpuExperts::takes_any_rows), of a problem that it takes.
  bool (*takes_any_rows)(const MoeProblem& problem);
  // ok, or the reason for refusing, without looking at weights or a device.
  Status (*can_implement)(const MoeProblem& problem);
  // Bytes for M tokens, monotone in tokens, without a device.
  Result<std::int64_t> (*workspace_size)(const MoeProblem& problem, std::int64_t tokens);
  // Null in a build without CUDA.
  Result<std::unique_ptr<GpuExperts>> (*create)(const MoeProblem& problem, ExpertSource& source,
                                                int device);
};

// Fastest first; the general one is last.
std::span<const GpuBackend> gpu_backends();
// The first that takes the problem, or the one called `forced`. kUnsupported with every reason.
Result<const GpuBackend*> choose_gpu_backend(const MoeProblem& problem,
                                             std::string_view forced = {});

}  // namespace moesaic::cuda
