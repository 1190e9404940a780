// Elements as the general kernels read them: those of cuda/element.cuh, and e4m3.
#pragma once

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/fp8.cuh"

namespace moesaic::cuda {

__device__ __forceinline__ float f32_of_bf16(std::uint16_t code) {
  return __uint_as_float(static_cast<std::uint32_t>(code) << 16);
}
__device__ __forceinline__ float f32_of_e4m3(std::uint8_t code) {
  std::uint32_t pair = 0;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<std::uint16_t>(code)));
  return f32_of_f16(static_cast<std::uint16_t>(pair & 0xFFFFU));
}

__device__ __forceinline__ float round_element(DType dtype, float v) {
  if (dtype == DType::kBF16) return f32_of_bf16(bf16_code(v));
  if (dtype == DType::kF16) return round_f16(v);
  return v;
}

// An element as a GEMM reads it: rounded, and multiplied with the router's weight first where the
// model asks for it. The dtype is the same for all threads of a launch.
__device__ __forceinline__ float operand_element(const void* p, DType dtype, std::int64_t i,
                                                 DType round, const float* factor) {
  if (dtype == DType::kF8E4M3) return f32_of_e4m3(static_cast<const std::uint8_t*>(p)[i]);
  const float v = round_element(round, load_element(p, dtype, i));
  return factor == nullptr ? v : round_element(round, v * round_element(round, *factor));
}

}  // namespace moesaic::cuda
