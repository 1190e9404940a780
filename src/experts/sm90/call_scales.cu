#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "experts/sm90/call_scales.h"

namespace moesaic::cuda {
namespace {

constexpr int kScaleThreads = 256;

// A block for each GEMM.
__global__ void __launch_bounds__(kScaleThreads)
    take_call_scales(const __grid_constant__ CallScalesParams p) {
  const CudaCallScales given = blockIdx.x == 0 ? p.given[0] : p.given[1];
  if (given.of == nullptr) return;
  for (std::int64_t e = threadIdx.x; e < p.experts; e += kScaleThreads) {
    std::int64_t from = given.one_for_all ? 0 : e;
    MOESAIC_CUDA_FAULT(cuda_call_scales_of_the_first_expert, from = 0;)
    const float s = given.of[from];
    bool valid = s > 0.0F && s <= 3.402823466e+38F;
    MOESAIC_CUDA_FAULT(cuda_call_scales_not_checked, valid = true;)
    p.to[blockIdx.x * p.experts + e] = valid ? s : __int_as_float(0x7FC00000);
  }
}

}  // namespace

int launch_call_scales(const CallScalesParams& params, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  return launch_kernel(take_call_scales, 2, kScaleThreads, 0, stream, params);
}

}  // namespace moesaic::cuda
