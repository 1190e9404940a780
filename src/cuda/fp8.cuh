// The arithmetic of 1x128 activation quantisation on the device, bit for bit that of fp8_group.h.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"

namespace moesaic::cuda {

// Scale of a group with largest magnitude amax (not NaN).
__device__ __forceinline__ float fp8_scale(float amax, bool power_of_two) {
  const float scale = fmaxf(amax, 1e-10F) / 448.0F;
  if (!power_of_two) return scale;
  // Up to the next power of two, through the exponent field.
  const std::uint32_t bits = __float_as_uint(fmaxf(scale, 1e-10F));
  MOESAIC_CUDA_FAULT(cuda_fp8_scale_rounded_down, return __uint_as_float(bits & 0x7F800000U);)
  return __uint_as_float((bits + 0x007FFFFFU) & 0x7F800000U);
}

// y / s correctly rounded (both normal), r being 1 / s: one residual step after the product.
__device__ __forceinline__ float divide(float y, float s, float r) {
  const float q = y * r;
  return fmaf(fmaf(-q, s, y), r, q);
}

__device__ __forceinline__ float round_bf16(float v) {
  return __uint_as_float(ptx::bf16x2(0.0F, v) & 0xFFFF0000U);
}
__device__ __forceinline__ float bf16_low(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float bf16_high(std::uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000U);
}

}  // namespace moesaic::cuda
