// Single elements of F32, BF16 and F16 arrays, in kernels whose time is not theirs.
#pragma once

#include <cstdint>

#include "moesaic/kinds.h"

namespace moesaic::cuda {

__device__ __forceinline__ float f32_of_f16(std::uint16_t code) {
  float v = 0;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(code));
  return v;
}

// Element i, widened exactly.
__device__ __forceinline__ float load_element(const void* p, DType dtype, std::int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(p)[i];
  const std::uint16_t code = static_cast<const std::uint16_t*>(p)[i];
  if (dtype == DType::kBF16) return __uint_as_float(static_cast<std::uint32_t>(code) << 16);
  return f32_of_f16(code);
}

__device__ __forceinline__ std::uint16_t bf16_code(float v) {
  std::uint16_t code = 0;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(code) : "f"(v));
  return code;
}
__device__ __forceinline__ std::uint16_t f16_code(float v) {
  std::uint16_t code = 0;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(v));
  return code;
}
__device__ __forceinline__ float round_f16(float v) { return f32_of_f16(f16_code(v)); }

// Element i = v, rounded to nearest even.
__device__ __forceinline__ void store_element(void* p, DType dtype, std::int64_t i, float v) {
  if (dtype == DType::kF32) {
    static_cast<float*>(p)[i] = v;
  } else {
    static_cast<std::uint16_t*>(p)[i] = dtype == DType::kBF16 ? bf16_code(v) : f16_code(v);
  }
}

}  // namespace moesaic::cuda
