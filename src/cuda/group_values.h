// Rows quantised to e4m3 or e2m1 in small groups, written down as the values of their codes: code
// times the group's scale, which is exact in bf16. Host and device, so that every case is tested
// without a GPU: the codes and scales of ref_quantize_row (experts/reference/operand.h), bit for
// bit, but for NaN, which stays NaN.
#pragma once

#include <bit>
#include <cstdint>
#ifndef __CUDACC__
#include <cmath>
#endif

#include "cuda/quant_rows.h"

#ifdef __CUDACC__
#define MOESAIC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOESAIC_HOST_DEVICE inline
#endif

namespace moesaic::cuda {

namespace group_values_bits {

MOESAIC_HOST_DEVICE std::uint32_t bits_of(float v) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(v);
#else
  return std::bit_cast<std::uint32_t>(v);
#endif
}
MOESAIC_HOST_DEVICE float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
// A product that no compiler joins with the addition behind it.
MOESAIC_HOST_DEVICE float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

}  // namespace group_values_bits

// The number nearest to v with kMantissa bits behind the leading one, the same step below 2^kSmallest,
// and magnitude up to `largest`; ties to even.
template <int kMantissa, int kSmallest>
MOESAIC_HOST_DEVICE float nearest_code(float v, float largest) {
  using group_values_bits::bits_of, group_values_bits::float_of;
  constexpr std::uint32_t kField = 127 + kSmallest;
  const std::uint32_t sign = bits_of(v) & 0x80000000U;
  const float magnitude = fminf(fabsf(v), largest);
  std::uint32_t field = bits_of(magnitude) >> 23;
  field = field > kField ? field : kField;
  // 1.5 * 2^23 steps: sums with it are whole steps.
  const float many = float_of(((field + 23 - kMantissa) << 23) | 0x00400000U);
  const float rounded = (magnitude + many) - many;
  return v == v ? float_of(bits_of(rounded) | sign) : v;
}
MOESAIC_HOST_DEVICE float nearest_e2m1(float v) { return nearest_code<1, 0>(v, 6.0F); }
MOESAIC_HOST_DEVICE float nearest_e4m3(float v) { return nearest_code<3, -6>(v, 448.0F); }

// What a group's values are multiplied by before they are rounded, and its scale after that. Both
// zero: a group of zeros.
struct GroupScale {
  float to_codes, scale;
};

// Of a group with largest magnitude amax (not NaN). gscale: of kNv4Values, 1 / input_scale.
MOESAIC_HOST_DEVICE GroupScale group_scale(RowForm form, float amax, float gscale) {
  using group_values_bits::bits_of, group_values_bits::float_of, group_values_bits::product;
  if (form == RowForm::kNv4Values) {
    const float scale = nearest_e4m3(product(gscale, amax / 6.0F));
    return {scale == 0.0F ? 0.0F : gscale / scale, scale};
  }
  if (form == RowForm::kFp8Values) {
    const float exact = fmaxf(fmaxf(amax, 1e-10F) / 448.0F, 1e-10F);
    const float scale = float_of((bits_of(exact) + 0x007FFFFFU) & 0x7F800000U);
    return {1.0F / scale, scale};
  }
  // The exponent field of amax, rounded up from above 1.75 for e4m3 (whose largest code is 1.75 *
  // 2^8) and from 1.75 for e2m1 (whose largest power of two is 2^2).
  const bool wide = form == RowForm::kMx8Values;
  const std::uint32_t bits = bits_of(amax);
  int field = static_cast<int>((bits + (wide ? 0x001FFFFFU : 0x00200000U)) >> 23) - (wide ? 8 : 2);
  if (wide) {
    if (field < 1) field = bits != 0 ? 1 : 0;
    if (bits == 0x7F800000U) field = 254;
  }
  if (field <= 0) return {0.0F, 0.0F};
  const std::uint32_t inverse =
      field == 254 ? 0x00400000U : static_cast<std::uint32_t>(254 - field) << 23;
  return {float_of(inverse), float_of(static_cast<std::uint32_t>(field) << 23)};
}

// The value of x's code.
MOESAIC_HOST_DEVICE float group_value(RowForm form, const GroupScale& g, float x) {
  using group_values_bits::product;
  if (g.scale == 0.0F) return x == x ? 0.0F : x;  // also where all others are zero or NaN
  const float v = product(x, g.to_codes);
  const bool e4m3 = form == RowForm::kMx8Values || form == RowForm::kFp8Values;
  return product(e4m3 ? nearest_e4m3(v) : nearest_e2m1(v), g.scale);
}

}  // namespace moesaic::cuda

#undef MOESAIC_HOST_DEVICE
