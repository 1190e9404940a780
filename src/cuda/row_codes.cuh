// The arithmetic of quantising a row with one scale on the device, bit for bit that of fp8_scaled.h
// and int_group.h (kToken and kTensor of experts/reference/operand.cc).
#pragma once

#include <cstdint>

#include "cuda/fp8.cuh"

namespace moesaic::cuda {

// Values and scale are multiplied by kOfTinyScale, exactly, before the division.
inline constexpr float kTinyScale = 0x1p-60F, kOfTinyScale = 0x1p64F;

struct RowScale {
  float s, r;  // scale and its reciprocal; of a tiny scale that of s * kOfTinyScale
};

// The larger magnitude of a row. No int8 code is NaN: there it stays in the scale.
__device__ __forceinline__ float larger(bool int8, float a, float b) {
  return int8 ? ptx::max_nan(a, b) : fmaxf(a, b);
}
// Of a row with largest magnitude amax; NaN of int8 only.
__device__ __forceinline__ RowScale own_row_scale(bool int8, float amax) {
  constexpr float kFp8Smallest = 1.0F / (448.0F * 512.0F);
  const float s = int8 ? (amax == 0.0F ? 1.0F : amax / 127.0F) : fmaxf(amax / 448.0F, kFp8Smallest);
  return {s, 1.0F / (s < kTinyScale ? s * kOfTinyScale : s)};
}
__device__ __forceinline__ RowScale static_row_scale(float s) { return {s, 1.0F / s}; }

// Four int8 codes: round to nearest even, saturating; NaN becomes 0 (its row has a scale of NaN).
__device__ __forceinline__ std::uint32_t int8x4(float a, float b, float c, float d) {
  const auto code = [](float v) {
    v = v == v ? fminf(fmaxf(v, -128.0F), 127.0F) : 0.0F;
    return __float_as_uint(v + 12582912.0F);  // 1.5 * 2^23: the code is the lowest byte
  };
  return __byte_perm(__byte_perm(code(a), code(b), 0x0040), __byte_perm(code(c), code(d), 0x0040),
                     0x5410);
}

// Codes of eight values. fixed: a static scale, by which values are not divided but multiplied by
// its reciprocal.
__device__ __forceinline__ uint2 row_codes(bool int8, bool fixed, const RowScale& scale,
                                           const float (&f)[8]) {
  // 1 / s of tiny int8 scales would be infinite.
  const float up = int8 && scale.s < kTinyScale ? kOfTinyScale : 1.0F;
  const float s = scale.s * up;
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = int8 ? f[i] * up : f[i];
    v[i] = fixed ? x * scale.r : divide(x, s, scale.r);
  }
  if (int8) return make_uint2(int8x4(v[0], v[1], v[2], v[3]), int8x4(v[4], v[5], v[6], v[7]));
  return make_uint2(ptx::e4m3x2(v[0], v[1]) | ptx::e4m3x2(v[2], v[3]) << 16,
                    ptx::e4m3x2(v[4], v[5]) | ptx::e4m3x2(v[6], v[7]) << 16);
}

// Eight bf16 as numbers.
__device__ __forceinline__ void bf16x8(const uint4& v, float (&f)[8]) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    f[2 * j] = bf16_low(words[j]);
    f[2 * j + 1] = bf16_high(words[j]);
  }
}

}  // namespace moesaic::cuda
