#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "experts/sm90/gather_rows.h"

namespace moesaic::cuda {
namespace {

// The local expert of a pair; -1: none.
__device__ __forceinline__ std::int32_t expert_of_pair(const GatherRowsParams& p,
                                                       std::int64_t pair) {
  if (p.slab_counts != nullptr) {
    const auto e = static_cast<std::int32_t>(pair / p.slab_rows);
    return pair % p.slab_rows < p.slab_counts[e] ? e : -1;
  }
  std::int32_t id = p.topk_ids[pair];
  if (id < 0 || id >= p.num_experts) return -1;
  if (p.expert_map != nullptr) id = p.expert_map[id];
  return id < p.num_local_experts ? id : -1;
}

// Eight columns per thread at a time.
__device__ __forceinline__ void gather_expert_row(const GatherRowsParams& p, std::int64_t pair) {
  std::int32_t id = expert_of_pair(p, pair);
  if (id < 0) return;
  MOESAIC_CUDA_FAULT(cuda_gather_has_the_order_of_the_first_expert, id = 0;)
  const std::uint16_t* const x = p.x + pair / p.top_k * p.columns;
  const std::int32_t* const perm = p.perm + id * p.columns;
  std::uint16_t* const to = p.rows + pair * p.columns;
  for (std::int64_t k = threadIdx.x * 8; k < p.columns; k += blockDim.x * 8) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = x[perm[k + 2 * i]] | static_cast<std::uint32_t>(x[perm[k + 2 * i + 1]]) << 16;
    }
    *reinterpret_cast<uint4*>(to + k) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// A block per pair at a time.
__global__ void gather_expert_rows(GatherRowsParams p) {
  for (std::int64_t pair = blockIdx.x; pair < p.pairs; pair += gridDim.x) {
    gather_expert_row(p, pair);
  }
}

}  // namespace

int launch_gather_rows(const GatherRowsParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  // Slabs are mostly rows that do not count.
  constexpr std::int64_t kSlabBlocks = 4096;
  const std::int64_t blocks =
      params.slab_counts != nullptr ? std::min(params.pairs, kSlabBlocks) : params.pairs;
  return launch_kernel(gather_expert_rows, static_cast<unsigned>(blocks), 256, 0, stream, params);
}

}  // namespace moesaic::cuda
