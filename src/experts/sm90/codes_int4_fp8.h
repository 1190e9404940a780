// int4 weights of FP8 products: a code times the e4m3 scale of its group, rounded to e4m3, by a
// table of the 16 products, of which the image has those of 1 to 8. Host and device, so that every
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

// What the image has of a scale: e4m3 codes of 8, 1, 2 and 3 times it, then of 4 to 7 times. To make
// them in the kernel took a fifth of its main loop.
struct Int4Multiples {
  std::uint32_t low, high;
};

MOESAIC_HOST_DEVICE Int4Multiples int4_multiples(std::uint32_t scale) {
  const float s = e4m3_number(scale);
  return {e4m3_codes(8.0F * s, s) | e4m3_codes(2.0F * s, 3.0F * s) << 16,
          e4m3_codes(4.0F * s, 5.0F * s) | e4m3_codes(6.0F * s, 7.0F * s) << 16};
}

// The products of codes 0 to 7, and of -8 to -1, with one scale.
struct Int4Products {
  std::uint32_t positive[2], negative[2];
};

MOESAIC_HOST_DEVICE Int4Products int4_products(const Int4Multiples& m) {
  Int4Products p;
  p.positive[0] = m.low & 0xFFFFFF00U;
  p.positive[1] = m.high;
  // Magnitudes 8, 7, 6, 5 and 4, 3, 2, 1.
  p.negative[0] = pick_bytes(m.high, m.low, 0x1234) ^ 0x80808080U;
  p.negative[1] = pick_bytes(m.low, m.high, 0x1234) ^ 0x80808080U;
  return p;
}

// For each of four bytes, which it is of the products of positive codes.
inline constexpr std::uint32_t kInt4Order = 0x32103210U;

// Two registers of four e4m3 codes each, from a word. order: kInt4Order.
MOESAIC_HOST_DEVICE void int4_fp8_pair(std::uint32_t word, const Int4Products& p,
                                       std::uint32_t& first, std::uint32_t& second,
                                       std::uint32_t order = kInt4Order) {
  const std::uint32_t index = word & 0x77777777U;
  const std::uint32_t sign = (word >> 1 & 0x44444444U) | order;
  const auto picked = [&](int shift) {
    return pick_bytes(pick_bytes(p.positive[0], p.positive[1], index >> shift),
                      pick_bytes(p.negative[0], p.negative[1], index >> shift), sign >> shift);
  };
  first = picked(0);
  second = picked(16);
}

}  // namespace moesaic::cuda

#undef MOESAIC_HOST_DEVICE
