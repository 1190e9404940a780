#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "experts/sm90/gather_rows.h"

namespace moesaic::cuda {
namespace {

// A block per pair, eight columns per thread at a time.
__global__ void gather_expert_rows(GatherRowsParams p) {
  const std::int64_t pair = blockIdx.x;
  std::int32_t id = p.topk_ids[pair];
  if (id < 0 || id >= p.num_experts) return;
  if (p.expert_map != nullptr) id = p.expert_map[id];
  if (id < 0 || id >= p.num_local_experts) return;
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

}  // namespace

int launch_gather_rows(const GatherRowsParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  gather_expert_rows<<<static_cast<unsigned>(params.pairs), 256, 0,
                       static_cast<cudaStream_t>(stream)>>>(params);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace moesaic::cuda
