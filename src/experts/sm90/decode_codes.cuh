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
#include "experts/sm90/codes_bytes.h"
#include "experts/sm90/codes_e4m3.h"
#include "experts/sm90/codes_int4.h"
#include "experts/sm90/codes_int6.h"
#include "experts/sm90/codes_integer.h"
#include "experts/sm90/codes_table.h"
#include "experts/sm90/strip_scales.cuh"

namespace moesaic::cuda {

// Zero points of rows g and g + 8, a byte each.
__device__ __forceinline__ std::uint32_t load_zeros(const CodeImage& image, std::uint32_t slab,
                                                    int block, int unit, int thread) {
  const int at = image.zero_at + (block * image.units + unit) * 64 + (thread >> 2) * 2;
  return load_shared_pair(slab + static_cast<std::uint32_t>(at));
}

// A thread's codes of a block: 4 bits, a word of each k16 step.
struct NibbleCodes {
  static constexpr int kBytes = kSlabRows * 32;  // of a slab
  uint4 piece;

  __device__ __forceinline__ void load(std::uint32_t slab, int block, int thread) {
    piece = load_shared_16(slab + static_cast<std::uint32_t>(block * 2048 + thread * 16));
  }
  __device__ __forceinline__ std::uint32_t word(int step) const {
    const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    return words[step];
  }
  // What makes an integer of the bits of register i.
  static __device__ __forceinline__ std::uint32_t factor(int i) {
    return (i & 1) == 0 ? kIntegerFactor : kSixteenthsFactor;
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
    int4_fragment(word(step), a);
  }
};

// 6 bits, three words of two steps.
struct SixBitCodes {
  static constexpr int kBytes = kSlabRows * 48;
  uint4 piece;
  uint2 end;

  __device__ __forceinline__ void load(std::uint32_t slab, int block, int thread) {
    piece = load_shared_16(slab + static_cast<std::uint32_t>(block * 2048 + thread * 16));
    end = load_shared_8_bytes(slab + static_cast<std::uint32_t>(4096 + block * 1024 + thread * 8));
  }
  static __device__ __forceinline__ std::uint32_t factor(int) { return kIntegerFactor; }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
    if (step < 2) {
      int6_fragment({piece.x, piece.y, piece.z}, step, a);
    } else {
      int6_fragment({piece.w, end.x, end.y}, step - 2, a);
    }
  }
};

// 8 bits, two words of each step.
struct ByteCodes {
  static constexpr int kBytes = kSlabRows * 64;
  uint4 piece[2];

  __device__ __forceinline__ void load(std::uint32_t slab, int block, int thread) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      piece[i] =
          load_shared_16(slab + static_cast<std::uint32_t>(block * 4096 + i * 2048 + thread * 16));
    }
  }
  __device__ __forceinline__ std::uint32_t word(int step, int index) const {
    const uint4& p = piece[step >> 1];
    return (step & 1) == 0 ? (index == 0 ? p.x : p.y) : (index == 0 ? p.z : p.w);
  }
  static __device__ __forceinline__ std::uint32_t factor(int) { return kIntegerFactor; }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = byte_pair(word(step, i >> 1), i & 1);
  }
};

template <class Codes, class Scales>
struct DecodeIntegers {
  static constexpr int kCodesBytes = Codes::kBytes;
  static constexpr int kUnits = Scales::kUnits;
  Codes codes;
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
    codes.fragment(step, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t own = spread_half(addend[step * kUnits / 4], i & 1);
      a[i] = scales.times(fma_bf16x2(a[i], Codes::factor(i), own), step, i & 1);
    }
  }
};

template <class Scales>
struct DecodeTable {
  static constexpr int kCodesBytes = NibbleCodes::kBytes;
  static constexpr bool kHasTable = true;
  NibbleCodes codes;
  Scales scales;
  std::uint32_t table;  // shared address of the lane's words of the table of pairs

  __device__ __forceinline__ void load_codes(std::uint32_t slab, int block, int thread) {
    codes.load(slab, block, thread);
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = ptx::load_shared(table + table_offset(codes.word(step), i));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = scales.times(a[i], step, i & 1);
  }
};

struct DecodeE4M3 {
  static constexpr int kCodesBytes = ByteCodes::kBytes;
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
