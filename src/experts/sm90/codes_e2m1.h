// How e2m1 codes lie in a word of the image, and how they become bf16: host and device, so that
// every code is tested without a GPU.
//
// A 16-bit half of a word has four codes, those of one element of K in the four registers of a
// wgmma fragment. A code S EEM is found under 0x81C0 (S at 15, EEM at 8 .. 6) after a shift by 0, 3
// and 6; the fourth has the bits that these leave: S at 14, the upper E at 13, the lower E and M at
// 11 and 10. Under that mask a code is a bf16 number, its value times 2^-126, subnormal where EE is
// 0.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOESAIC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOESAIC_HOST_DEVICE inline
#endif

namespace moesaic::cuda {

inline constexpr std::uint32_t kE2m1Mask = 0x81C081C0U;

// The bits of `code` as number `index` of a half.
MOESAIC_HOST_DEVICE constexpr std::uint32_t place_e2m1(std::uint32_t code, int index) {
  const std::uint32_t sign = code >> 3 & 1, rest = code & 7;
  if (index < 3) return (sign << 15 | rest << 6) >> (3 * index);
  return sign << 14 | (rest >> 2) << 13 | (rest & 3) << 10;
}

// The four registers of a fragment, as bf16 pairs of value * 2^-126, from a word.
MOESAIC_HOST_DEVICE constexpr void e2m1_fragment(std::uint32_t word, std::uint32_t (&a)[4]) {
  a[0] = word & kE2m1Mask;
  a[1] = word << 3 & kE2m1Mask;
  a[2] = word << 6 & kE2m1Mask;
  a[3] = (word << 1 & 0x80008000U) | (word >> 5 & 0x01000100U) | (word >> 4 & 0x00C000C0U);
}

// The exponent field of the bf16 factor that makes value * 2^-126 into value * 2^(e8m0 - 127).
MOESAIC_HOST_DEVICE constexpr int e2m1_factor(int e8m0) { return e8m0 + 126; }
// Exponents whose factor is a bf16 number and whose products with every code are exact.
inline constexpr int kLeastE2m1Scale = -5, kLargestE2m1Scale = 128;

}  // namespace moesaic::cuda

#undef MOESAIC_HOST_DEVICE
