#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "gate/sm90/round_logits.h"

namespace moesaic::cuda {
namespace {

constexpr int kRoundThreads = 256;

__device__ __forceinline__ std::uint16_t code_of(float v, DType dtype) {
  return dtype == DType::kBF16 ? bf16_code(v) : f16_code(v);
}
__device__ __forceinline__ float rounded(float v, DType dtype) {
  if (dtype == DType::kF32) return v;
  const std::uint16_t code = code_of(v, dtype);
  if (dtype == DType::kBF16) return __uint_as_float(static_cast<std::uint32_t>(code) << 16);
  return f32_of_f16(code);
}

__device__ __forceinline__ float scaled(const RoundLogitsParams& p, std::int64_t i) {
  const float sum = __fmul_rn(p.from[i], p.row_factors[i / p.columns]);
  return p.bias != nullptr ? sum + p.bias[i % p.columns] : sum;
}

// A thread reads its element before it writes it, so `to` may be `from`.
__global__ void __launch_bounds__(kRoundThreads)
    round_logits_kernel(const __grid_constant__ RoundLogitsParams p) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kRoundThreads + threadIdx.x;
       i < p.count; i += static_cast<std::int64_t>(gridDim.x) * kRoundThreads) {
    const float sum = p.row_factors == nullptr ? p.from[i] : scaled(p, i);
    float v = rounded(sum, p.linear);
    MOESAIC_CUDA_FAULT(cuda_gate_linear_stays_fp32, v = sum;)
    if (p.to_dtype == DType::kF32) {
      const float logit = rounded(v, p.logits);
      MOESAIC_CUDA_FAULT(cuda_gate_logits_stay_unrounded, static_cast<float*>(p.to)[i] = v;
                         continue;)
      static_cast<float*>(p.to)[i] = logit;
    } else {
      static_cast<std::uint16_t*>(p.to)[i] = code_of(v, p.to_dtype);
    }
  }
}

}  // namespace

int launch_round_logits(const RoundLogitsParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.count == 0) return 0;
  return launch_kernel(round_logits_kernel, looping_blocks(p.count, kRoundThreads), kRoundThreads,
                       0, stream, p);
}

}  // namespace moesaic::cuda
