#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "layer/sm90/balance_ops.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1024;

__global__ void __launch_bounds__(kThreads)
    balance_ids(const __grid_constant__ BalanceState s, const std::int32_t* ids, std::int64_t count,
                std::int32_t* mapped) {
  const bool record = s.header->record != 0;
  for (std::int64_t p = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; p < count;
       p += std::int64_t{gridDim.x} * kThreads) {
    const std::int32_t expert = ids[p];
    if (expert < 0 || expert >= s.num_logical) {
      mapped[p] = -1;
      continue;
    }
    const std::int32_t first = s.first[expert], replicas = s.first[expert + 1] - first;
    std::int64_t replica = p % replicas;
    MOESAIC_CUDA_FAULT(cuda_balance_replica_off_by_one, replica = (p + 1) % replicas;)
    const std::int32_t slot = s.slots[first + replica];
    mapped[p] = slot;
    if (record) atomicAdd(s.step + slot, 1U);
  }
}

// One block.
__global__ void __launch_bounds__(kThreads) balance_step(const __grid_constant__ BalanceState s) {
  const bool record = s.header->record != 0;
  const std::int32_t row = s.header->next;
  std::uint32_t* const load = s.ring + std::int64_t{row} * s.num_logical;
  if (record) {
    for (int e = static_cast<int>(threadIdx.x); e < s.num_logical; e += kThreads) load[e] = 0;
  }
  __syncthreads();
  for (int p = static_cast<int>(threadIdx.x); p < s.num_physical; p += kThreads) {
    const std::uint32_t count = s.step[p];
    s.step[p] = 0;
    MOESAIC_CUDA_FAULT(cuda_balance_steps_add_up, s.step[p] = count;)
    if (!record || count == 0) continue;
    atomicAdd(load + s.expert[p], count);
    s.total[p] += count;
  }
  __syncthreads();
  if (record && threadIdx.x == 0) s.header->next = row + 1 == s.window ? 0 : row + 1;
}

}  // namespace

int launch_balance_ids(const BalanceState& state, const std::int32_t* ids, std::int64_t count,
                       std::int32_t* mapped, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (count == 0) return 0;
  const auto blocks =
      static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostBlocks));
  return launch_kernel(balance_ids, blocks, kThreads, 0, stream, state, ids, count, mapped);
}

int launch_balance_step(const BalanceState& state, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  return launch_kernel(balance_step, 1, kThreads, 0, stream, state);
}

}  // namespace moesaic::cuda
