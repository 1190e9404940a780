// Scales of weights that are decoded in registers, as decode_codes.cuh uses them: strips behind the
// codes of a slab (repack_strips.h).
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/codes_bytes.h"
#include "experts/sm90/codes_integer.h"
#include "experts/sm90/gemm_codes.cuh"

namespace moesaic::cuda {

__device__ __forceinline__ std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b,
                                                    std::uint32_t c) {
  std::uint32_t d = 0;
  asm volatile("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint2 load_shared_8_bytes(std::uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t load_shared_pair(std::uint32_t address) {
  std::uint16_t v = 0;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

// Of scale `at` of rows g and g + 8, the 32 bits of a strip.
__device__ __forceinline__ std::uint32_t load_strip(std::uint32_t slab, int strip, int at,
                                                    int quad) {
  return ptx::load_shared(slab + static_cast<std::uint32_t>(strip + at * 128 + quad * 4));
}

__device__ __forceinline__ float f32_of_half(std::uint32_t bits) {
  float v = 0;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(static_cast<std::uint16_t>(bits)));
  return v;
}

// F32 bits of that scale: the upper 16 of both rows in a word, the next 8 in another.
struct ScalePair {
  std::uint32_t upper = 0, lower = 0;

  // codes_bytes: of a slab, in front of the strip. quad: a thread's, of its warpgroup.
  __device__ __forceinline__ ScalePair(const CodeImage& image, std::uint32_t slab, int codes_bytes,
                                       int at, int quad) {
    upper = load_strip(slab, codes_bytes, at, quad);
    if (image.low_at != 0) {
      lower =
          load_shared_pair(slab + static_cast<std::uint32_t>(image.low_at + at * 64 + quad * 2));
    }
    MOESAIC_CUDA_FAULT(cuda_codes_lose_the_low_bits, lower = 0;)
  }
  __device__ __forceinline__ std::uint32_t upper_bits(int row) const {
    return row == 0 ? upper << 16 : upper & 0xFFFF0000U;
  }
  __device__ __forceinline__ std::uint32_t lower_bits(int row) const {
    return (row == 0 ? lower << 8 : lower) & 0xFF00U;
  }
};

// One scale of each row in a chunk.
struct ScalesOfSums {
  static constexpr int kUnits = 1;
  float of_row[2];

  __device__ __forceinline__ void load(const CodeImage& image, std::uint32_t slab, int codes_bytes,
                                       int block, int thread) {
    const ScalePair pair(image, slab, codes_bytes, block, thread >> 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      of_row[r] = __uint_as_float(pair.upper_bits(r) | pair.lower_bits(r));
    }
    MOESAIC_CUDA_FAULT(cuda_sums_have_the_scale_of_the_row_above, of_row[1] = of_row[0];)
  }
  __device__ __forceinline__ std::uint32_t times(std::uint32_t v, int, int) const { return v; }
};

// An operand of v in row g or g + 8.
template <bool kMinima>
__device__ __forceinline__ std::uint32_t times_scale(std::uint32_t v, std::uint32_t upper,
                                                     std::uint32_t lower, std::uint32_t offset,
                                                     int row) {
  std::uint32_t rest = 0;
  if constexpr (kMinima) {
    rest = fma_bf16x2(v, spread_half(lower, row), spread_half(offset, row));
  } else {
    rest = multiply_bf16x2(v, spread_half(lower, row));
  }
  return fma_bf16x2(v, spread_half(upper, row), rest);
}

// Scales of rows g and g + 8, of kUnits parts of 64 elements of K. kRests: the image has what the upper
// halves leave as bf16, more bytes and fewer instructions. kMinima: weights have an offset.
template <int kParts, bool kRests, bool kMinima>
struct StripScales {
  static constexpr int kUnits = kParts;
  std::uint32_t upper[kUnits], lower[kUnits];  // bf16 of both rows, and of what that leaves
  std::uint32_t offset[kMinima ? kUnits : 1];  // bf16 of both rows

  __device__ __forceinline__ void load(const CodeImage& image, std::uint32_t slab, int codes_bytes,
                                       int block, int thread) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      // Fewer units than kUnits: each is several of these.
      int unit = u * image.units / kUnits;
      MOESAIC_CUDA_FAULT(cuda_codes_have_the_first_scale, unit = 0;)
      const int at = block * image.units + unit;
      if constexpr (kRests) {
        upper[u] = load_strip(slab, codes_bytes, at, thread >> 2);
        lower[u] = 0;
        if (image.low_at != 0) lower[u] = load_strip(slab, image.low_at, at, thread >> 2);
        MOESAIC_CUDA_FAULT(cuda_codes_lose_the_low_bits, lower[u] = 0;)
      } else {
        const ScalePair pair(image, slab, codes_bytes, at, thread >> 2);
        upper[u] = pair.upper;
        lower[u] = pick_bytes(rest(pair.upper_bits(0), pair.lower_bits(0)),
                              rest(pair.upper_bits(1), pair.lower_bits(1)), 0x7632);
      }
      MOESAIC_CUDA_FAULT(cuda_codes_have_the_scale_of_the_row_above,
                         upper[u] = both_halves<false>(upper[u]);)
      if constexpr (kMinima) {
        offset[u] = load_strip(slab, image.offset_at, at, thread >> 2);
        MOESAIC_CUDA_FAULT(cuda_codes_lose_the_minimum, offset[u] = 0;)
      }
    }
  }
  __device__ __forceinline__ std::uint32_t times(std::uint32_t v, int step, int row) const {
    return times_scale<kMinima>(v, upper[step * kUnits / 4], lower[step * kUnits / 4],
                                offset[kMinima ? step * kUnits / 4 : 0], row);
  }

 private:
  // The whole scale less its upper half, as F32: at most 8 significant bits.
  static __device__ __forceinline__ std::uint32_t rest(std::uint32_t upper_bits,
                                                       std::uint32_t lower_bits) {
    return __float_as_uint(__uint_as_float(upper_bits | lower_bits) - __uint_as_float(upper_bits));
  }
};

// The same where a scale is an integer of a byte times an F16 number of the row and chunk. Both are bf16
// numbers, the F16 one two, so that upper and lower are made of a few products.
template <int kParts, bool kMinima>
struct SuperScales {
  static_assert(kParts % 2 == 0);
  static constexpr int kUnits = kParts;
  std::uint32_t upper[kUnits], lower[kUnits];
  std::uint32_t offset[kMinima ? kUnits : 1];

  __device__ __forceinline__ void load(const CodeImage& image, std::uint32_t slab, int codes_bytes,
                                       int block, int thread) {
    const int quad = thread >> 2;
    const Factor factor(load_strip(slab, image.low_at, block, quad));
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      int unit = u;
      MOESAIC_CUDA_FAULT(cuda_super_scales_are_the_first, unit = 0;)
      const std::uint32_t bytes =
          load_strip(slab, codes_bytes, block * (kUnits / 2) + unit / 2, quad);
      std::uint32_t code = fma_bf16x2(byte_pair(bytes, unit & 1), kIntegerFactor, kCodeOfZero);
      MOESAIC_CUDA_FAULT(cuda_super_scales_of_the_row_above, code = both_halves<false>(code);)
      upper[u] = fma_bf16x2(factor.upper, code, multiply_bf16x2(factor.lower, code));
      lower[u] =
          fma_bf16x2(factor.lower, code, fma_bf16x2(factor.upper, code, upper[u] ^ 0x80008000U));
      if constexpr (kMinima) {
        offset[u] = load_strip(slab, image.offset_at, block * kUnits + unit, quad);
        MOESAIC_CUDA_FAULT(cuda_super_scales_lose_the_minimum, offset[u] = 0;)
      }
    }
  }
  __device__ __forceinline__ std::uint32_t times(std::uint32_t v, int step, int row) const {
    return times_scale<kMinima>(v, upper[step * kUnits / 4], lower[step * kUnits / 4],
                                offset[kMinima ? step * kUnits / 4 : 0], row);
  }

 private:
  // The F16 numbers of both rows as bf16 numbers and what these leave, in the unit that makes an integer
  // of a code, and a scale of the image of that.
  struct Factor {
    std::uint32_t upper, lower;
    explicit __device__ __forceinline__ Factor(std::uint32_t halves) {
      std::uint32_t bits[2], rest[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float whole =
            f32_of_half(halves >> (16 * r)) * static_cast<float>(kIntegerUnit * kIntegerUnit);
        bits[r] = __float_as_uint(whole);
        rest[r] = __float_as_uint(whole - __uint_as_float(bits[r] & 0xFFFF0000U));
      }
      upper = pick_bytes(bits[0], bits[1], 0x7632);
      lower = pick_bytes(rest[0], rest[1], 0x7632);
    }
  };
  static constexpr std::uint32_t kCodeOfZero = 0xC000C000U;  // -128 / 64, twice
};

}  // namespace moesaic::cuda
