// How the e4m3 scales of NVFP4 weights become bf16 factors of their e2m1 codes (codes_e2m1.h): host
// and device, so that every scale is tested without a GPU.
//
// The image has a scale as five bits of exponent and three of mantissa, normalised: moved to bits
// 11 .. 4 of a bf16 number whose exponent field begins at kNvfp4Base, it is the scale times 2^118,
// and its product with a code of value * 2^-126 is value * scale * 2^-8, exactly.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOESAIC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOESAIC_HOST_DEVICE inline
#endif

namespace moesaic::cuda {

// What decoded weights are multiplied by to have their values: part of a row's factor.
inline constexpr float kNvfp4Unit = 256.0F;
inline constexpr std::uint32_t kNvfp4Base = 235;

// Of the magnitude of an e4m3 code that is neither zero nor NaN.
MOESAIC_HOST_DEVICE constexpr std::uint32_t nvfp4_strip(std::uint32_t magnitude) {
  std::uint32_t exponent = magnitude >> 3, mantissa = magnitude & 7;
  if (exponent != 0) return (exponent + 3) << 3 | mantissa;
  // Subnormal: 1 to 7 times 2^-9.
  exponent = mantissa >= 4 ? 3 : mantissa >= 2 ? 2 : 1;
  return exponent << 3 | ((mantissa << (4 - exponent)) & 7);
}
// Of the two strips in the halves of a word.
MOESAIC_HOST_DEVICE constexpr std::uint32_t nvfp4_factors(std::uint32_t strips) {
  return strips * 16 + kNvfp4Base * 0x00800080U;
}
// The code that stands for `code` under a scale: zero scales have none, negative ones turn signs.
MOESAIC_HOST_DEVICE constexpr std::uint32_t nvfp4_code(std::uint32_t code, std::uint32_t scale) {
  if ((scale & 0x7F) == 0) return 0;
  return code ^ (scale >> 4 & 8);
}

}  // namespace moesaic::cuda

#undef MOESAIC_HOST_DEVICE
