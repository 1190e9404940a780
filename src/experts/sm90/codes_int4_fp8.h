// int4 weights of FP8 products: a code times the e4m3 scale of its group, rounded to e4m3, by a
// table of the products of 1 to 8, which the image has, and a sign. Host and device, so that every
// scale and code is tested without a GPU.
//
// A word of the image has the eight codes of a thread and row in a k32 step, in the order of K: the
// lower half those of the fragment's first register of that row, the upper half the second's.
#pragma once

#include <cstdint>

#include "experts/sm90/pick_bytes.h"

#ifdef __CUDACC__
#define MOESAIC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOESAIC_HOST_DEVICE inline
#endif

#ifdef __CUDA_ARCH__
#include "cuda/ptx/sync.cuh"
#else
#include "numerics/float_codec.h"
#endif

namespace moesaic::cuda {

// e4m3 codes of two numbers, the first in the lower byte.
MOESAIC_HOST_DEVICE std::uint32_t e4m3_codes(float a, float b) {
#ifdef __CUDA_ARCH__
  return ptx::e4m3x2(a, b);
#else
  return static_cast<std::uint32_t>(e4m3_from_f32(a)) | static_cast<std::uint32_t>(e4m3_from_f32(b))
                                                            << 8;
#endif
}

// Of an e4m3 code that is not NaN.
MOESAIC_HOST_DEVICE float e4m3_number(std::uint32_t code) {
  // As bf16 it is its value times 2^-120: codes_e4m3.h.
  const std::uint32_t bits = (code & 0x80) << 24 | (code & 0x7F) << 20;
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits) * 0x1p120F;
#else
  return std::bit_cast<float>(bits) * 0x1p120F;
#endif
}

// What the image has of a scale, whose sign it leaves away: e4m3 codes of 1 to 4 times it, then of 5
// to 8 times. To make them in the kernel took a fifth of its main loop.
struct Int4Multiples {
  std::uint32_t low, high;
};

MOESAIC_HOST_DEVICE Int4Multiples int4_multiples(std::uint32_t scale) {
  const float s = e4m3_number(scale & 0x7F);
  return {e4m3_codes(s, 2.0F * s) | e4m3_codes(3.0F * s, 4.0F * s) << 16,
          e4m3_codes(5.0F * s, 6.0F * s) | e4m3_codes(7.0F * s, 8.0F * s) << 16};
}

// The image's codes of eight int4 numbers, two's complement: which multiple it is in three bits, the
// eighth for 0 too; then a bit that is set for 0 and positive numbers.
MOESAIC_HOST_DEVICE std::uint32_t int4_fp8_codes(std::uint32_t numbers) {
  std::uint32_t codes = 0;
  for (int i = 0; i < 32; i += 4) {
    const std::uint32_t n = numbers >> i & 15, magnitude = n < 8 ? n : 16 - n;
    codes |= (((magnitude - 1) & 7) | (n < 8 ? 8 : 0)) << i;
  }
  return codes;
}

// Two registers of four e4m3 codes each, from a word. two: 2, unknown to the compiler, so that it
// multiplies: permutations leave other units of the multiprocessor less to do.
MOESAIC_HOST_DEVICE void int4_fp8_pair(std::uint32_t word, const Int4Multiples& m,
                                       std::uint32_t& first, std::uint32_t& second,
                                       std::uint32_t two = 2) {
  // Bit 3 is set for 0 alone: a permutation then has copies of a multiple's sign, no bit.
  const std::uint32_t eighth = (word & 0x77777777U) + 0x11111111U;
  const std::uint32_t which = word & (eighth | 0x77777777U);
  constexpr std::uint32_t kHalfSign = 0x40404040U;  // of a negative one
  first = pick_bytes(kHalfSign, kHalfSign, word) * two + pick_bytes(m.low, m.high, which);
  second =
      pick_bytes(kHalfSign, kHalfSign, word >> 16) * two + pick_bytes(m.low, m.high, which >> 16);
}

}  // namespace moesaic::cuda

#undef MOESAIC_HOST_DEVICE
