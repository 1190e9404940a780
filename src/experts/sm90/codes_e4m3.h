// How e4m3 codes lie in a word of the image and become bf16, and how the scales of 4-bit and 8-bit
// microscaling weights become bf16 factors: host and device, so that every code is tested without a
// GPU.
//
// A 16-bit half of a word has two codes, those of one element of K in two registers of a wgmma
// fragment: in the upper byte that of the first. Moved to bits 15 and 10 .. 4 a code is a bf16
// number, its value times 2^-120, subnormal where it is.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOESAIC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOESAIC_HOST_DEVICE inline
#endif

namespace moesaic::cuda {

// Two registers of a fragment, as bf16 pairs of value * 2^-120, from a word.
MOESAIC_HOST_DEVICE constexpr void e4m3_pairs(std::uint32_t word, std::uint32_t (&a)[2]) {
  a[0] = (word & 0x80008000U) | (word >> 4 & 0x07F007F0U);
  a[1] = (word << 8 & 0x80008000U) | (word << 4 & 0x07F007F0U);
}

// The exponent field of the bf16 factor that makes value * 2^-120 into value * 2^(e8m0 - 127).
MOESAIC_HOST_DEVICE constexpr int e4m3_factor(int e8m0) { return e8m0 + 120; }
// Exponents whose factor is a bf16 number and whose products with every code are exact.
inline constexpr int kLeastE4m3Scale = 3, kLargestE4m3Scale = 134;

}  // namespace moesaic::cuda

#undef MOESAIC_HOST_DEVICE
