// Decoders of the formats whose scales are any numbers, as FromCodes (gemm_codes.cuh) uses them.
// Images: repack_strips.h. A code less its zero point is an exact bf16 number v.
//
// ScalesOfSums: v is the operand, and a stage's sums are multiplied by the scale of their row.
// StripScales, where a stage has more scales than one of a row: the operand is bf16(v * s). A scale
// has its upper 8 significant bits in one bf16 number and the next 8 in another: fma(v, upper, v *
// lower) rounds v * s once, but for 2^-16. Of weights with minima the zero point is the integer next
// to minimum / scale, and what that leaves, at most half a scale, takes the place of the zero in the
// inner product: fma(v, upper, fma(v, lower, offset)).
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/codes_bytes.h"
#include "experts/sm90/codes_e4m3.h"
#include "experts/sm90/codes_int4.h"
#include "experts/sm90/codes_integer.h"
#include "experts/sm90/codes_table.h"
#include "experts/sm90/gemm_codes.cuh"

namespace moesaic::cuda {

__device__ __forceinline__ std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b,
                                                    std::uint32_t c) {
  std::uint32_t d = 0;
  asm volatile("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint4 load_shared_16_bytes(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
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
  static constexpr bool kOffsets = false;
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

// Scales of rows g and g + 8, of kUnits parts of 64 elements of K. kRests: the image has what the upper
// halves leave as bf16, more bytes and fewer instructions. kMinima: weights have an offset.
template <int kParts, bool kRests, bool kMinima>
struct StripScales {
  static constexpr int kUnits = kParts;
  static constexpr bool kOffsets = kMinima;
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
    const int u = step * kUnits / 4;
    std::uint32_t rest = 0;
    if constexpr (kMinima) {
      rest = fma_bf16x2(v, spread_half(lower[u], row), spread_half(offset[u], row));
    } else {
      rest = multiply_bf16x2(v, spread_half(lower[u], row));
    }
    return fma_bf16x2(v, spread_half(upper[u], row), rest);
  }

 private:
  // The whole scale less its upper half, as F32: at most 8 significant bits.
  static __device__ __forceinline__ std::uint32_t rest(std::uint32_t upper_bits,
                                                       std::uint32_t lower_bits) {
    return __float_as_uint(__uint_as_float(upper_bits | lower_bits) - __uint_as_float(upper_bits));
  }
};

// Zero points of rows g and g + 8, a byte each.
__device__ __forceinline__ std::uint32_t load_zeros(const CodeImage& image, std::uint32_t slab,
                                                    int block, int unit, int thread) {
  const int at = image.zero_at + (block * image.units + unit) * 64 + (thread >> 2) * 2;
  return load_shared_pair(slab + static_cast<std::uint32_t>(at));
}

template <class Scales>
struct DecodeInt4 {
  static constexpr int kCodesBytes = kSlabRows * 32;
  static constexpr int kUnits = Scales::kUnits;
  static constexpr bool kOffsets = Scales::kOffsets;
  uint4 codes;
  Scales scales;
  std::uint32_t addend[kUnits];  // of rows g and g + 8

  __device__ __forceinline__ void load_codes(std::uint32_t slab, int block, int thread) {
    codes = load_shared_16_bytes(slab + static_cast<std::uint32_t>(block * 2048 + thread * 16));
  }
  __device__ __forceinline__ void load_zero_points(const CodeImage& image, std::uint32_t slab,
                                                   int block, int thread) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) addend[u] = image.addend;
    if (image.zero_at == 0) return;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const std::uint32_t zeros = load_zeros(image, slab, block, u * image.units / kUnits, thread);
      addend[u] = multiply_bf16x2(pick_bytes(zeros, 0, 0x4140), kZeroFactor);
      MOESAIC_CUDA_FAULT(cuda_codes_have_the_zero_point_of_the_row_above,
                         addend[u] = both_halves<false>(addend[u]);)
    }
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    int4_fragment(words[step], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t own = spread_half(addend[step * kUnits / 4], i & 1);
      const std::uint32_t factor = (i & 1) == 0 ? kIntegerFactor : kSixteenthsFactor;
      a[i] = scales.times(fma_bf16x2(a[i], factor, own), step, i & 1);
    }
  }
};

template <class Scales>
struct DecodeTable {
  static constexpr int kCodesBytes = kSlabRows * 32;
  uint4 codes;
  Scales scales;
  std::uint32_t table[8];

  __device__ __forceinline__ void load_codes(std::uint32_t slab, int block, int thread) {
    codes = load_shared_16_bytes(slab + static_cast<std::uint32_t>(block * 2048 + thread * 16));
  }
  __device__ __forceinline__ void load_zero_points(const CodeImage& image, std::uint32_t, int,
                                                   int) {
#pragma unroll
    for (int i = 0; i < 8; ++i) table[i] = image.table[i];
    MOESAIC_CUDA_FAULT(cuda_codes_have_one_half_of_the_table, table[2] = table[0];
                       table[3] = table[1]; table[6] = table[4]; table[7] = table[5];)
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    table_fragment(words[step], table, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = scales.times(a[i], step, i & 1);
  }
};

// The codes of 8-bit formats: two words of each k16 step.
struct ByteCodes {
  uint4 piece[2];

  __device__ __forceinline__ void load(std::uint32_t slab, int block, int thread) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      piece[i] = load_shared_16_bytes(
          slab + static_cast<std::uint32_t>(block * 4096 + i * 2048 + thread * 16));
    }
  }
  __device__ __forceinline__ std::uint32_t word(int step, int index) const {
    const uint4& p = piece[step >> 1];
    return (step & 1) == 0 ? (index == 0 ? p.x : p.y) : (index == 0 ? p.z : p.w);
  }
};

template <class Scales>
struct DecodeInt8 {
  static constexpr int kCodesBytes = kSlabRows * 64;
  static constexpr int kUnits = Scales::kUnits;
  static constexpr bool kOffsets = Scales::kOffsets;
  ByteCodes codes;
  Scales scales;
  std::uint32_t addend[kUnits];  // of rows g and g + 8

  __device__ __forceinline__ void load_codes(std::uint32_t slab, int block, int thread) {
    codes.load(slab, block, thread);
  }
  __device__ __forceinline__ void load_zero_points(const CodeImage& image, std::uint32_t slab,
                                                   int block, int thread) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) addend[u] = image.addend;
    if (image.zero_at == 0) return;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const std::uint32_t zeros = load_zeros(image, slab, block, u * image.units / kUnits, thread);
      addend[u] = multiply_bf16x2(pick_bytes(zeros, 0, 0x4140), kZeroFactor);
      MOESAIC_CUDA_FAULT(cuda_codes_have_the_zero_point_of_the_row_above,
                         addend[u] = both_halves<false>(addend[u]);)
    }
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t bits = byte_pair(codes.word(step, i >> 1), i & 1);
      const std::uint32_t own = spread_half(addend[step * kUnits / 4], i & 1);
      a[i] = scales.times(fma_bf16x2(bits, kIntegerFactor, own), step, i & 1);
    }
  }
};

struct DecodeE4M3 {
  static constexpr int kCodesBytes = kSlabRows * 64;
  ByteCodes codes;
  ScalesOfSums scales;

  __device__ __forceinline__ void load_codes(std::uint32_t slab, int block, int thread) {
    codes.load(slab, block, thread);
  }
  __device__ __forceinline__ void load_zero_points(const CodeImage&, std::uint32_t, int, int) {}
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      std::uint32_t two[2];
      e4m3_pairs(codes.word(step, i >> 1), two);
      a[i] = multiply_bf16x2(two[0], kE4m3Factor * 0x10001U);
      a[i + 1] = multiply_bf16x2(two[1], kE4m3Factor * 0x10001U);
    }
  }
};

}  // namespace moesaic::cuda
