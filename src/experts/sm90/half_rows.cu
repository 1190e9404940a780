#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/half_rows.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256, kColumns = 8;

// Eight columns per thread.
__global__ void __launch_bounds__(kThreads) half_rows(const __grid_constant__ HalfRowsParams p) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i * kColumns >= p.tokens * p.columns) return;
  float v[kColumns];
#pragma unroll
  for (int e = 0; e < kColumns; ++e) v[e] = load_element(p.x, p.dtype, i * kColumns + e);
  if (p.weights != nullptr) {
    float weight = round_f16(p.weights[i * kColumns / p.columns]);
    MOESAIC_CUDA_FAULT(cuda_half_rows_ignore_the_router_weight, weight = 1.0F;)
#pragma unroll
    for (float& e : v) e = round_f16(e) * weight;
  }
  *reinterpret_cast<uint4*>(p.rows + i * kColumns) =
      make_uint4(ptx::f16x2(v[0], v[1]), ptx::f16x2(v[2], v[3]), ptx::f16x2(v[4], v[5]),
                 ptx::f16x2(v[6], v[7]));
}

}  // namespace

int launch_half_rows(const HalfRowsParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const std::int64_t blocks = (params.tokens * params.columns / kColumns + kThreads - 1) / kThreads;
  if (blocks == 0) return 0;
  return launch_kernel(half_rows, static_cast<unsigned>(blocks), kThreads, 0, stream, params);
}

}  // namespace moesaic::cuda
