// Decoders of the grouped-GEMM kernel (gemm_codes.cuh) whose operands are bf16. A decoder reads a
// thread's codes and scales of 64 rows and 64 elements of K from a slab, and makes the fragment of
// each k16 step. Images: repack_codes.h.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/codes_e2m1.h"
#include "experts/sm90/codes_e4m3.h"
#include "experts/sm90/codes_nvfp4.h"
#include "experts/sm90/format_parts.h"
#include "experts/sm90/pick_bytes.h"

namespace moesaic::cuda {

// Volatile: stays before the fence in front of the multiply that reads it.
__device__ __forceinline__ std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d = 0;
  asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint4 load_shared_16(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// The factors of two groups of 32 elements: their exponent fields, of rows g and g + 8.
struct ThirtySecondFactors {
  std::uint32_t factor[2];  // [32 elements]: bf16 of row g, then of row g + 8

  __device__ __forceinline__ void load(std::uint32_t strips, int block, int thread) {
    const std::uint32_t strip =
        ptx::load_shared(strips + static_cast<std::uint32_t>(block * 128 + (thread >> 2) * 4));
    factor[0] = strip << 7 & 0x7F807F80U;  // bytes 0 and 2
    factor[1] = strip >> 1 & 0x7F807F80U;
    MOESAIC_CUDA_FAULT(cuda_codes_have_the_scale_of_the_row_above,
                       factor[0] = both_halves<false>(factor[0]);
                       factor[1] = both_halves<false>(factor[1]);)
    MOESAIC_CUDA_FAULT(cuda_codes_have_the_first_scale, factor[1] = factor[0];)
  }
  // Register i of a step's fragment times its factor.
  __device__ __forceinline__ std::uint32_t times(int step, int i, std::uint32_t a) const {
    return multiply_bf16x2(a, spread_half(factor[step >> 1], i & 1));
  }
};

// e2m1 codes and E8M0 scales per 32.
struct DecodeE2M1 {
  uint4 codes;
  ThirtySecondFactors factors;

  // slab: its shared address; block: which 64 rows.
  __device__ __forceinline__ void load(std::uint32_t slab, int block, int thread) {
    codes = load_shared_16(slab + static_cast<std::uint32_t>(block * 2048 + thread * 16));
    factors.load(slab + kSlabRows * 32, block, thread);
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    e2m1_fragment(words[step], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = factors.times(step, i, a[i]);
  }
};

// e2m1 codes and e4m3 scales per 16: a step's.
struct DecodeNvfp4 {
  uint4 codes;
  std::uint32_t strip[2];    // of rows g and g + 8: a byte per step
  std::uint32_t factors[2];  // of two steps of these rows

  __device__ __forceinline__ void load(std::uint32_t slab, int block, int thread) {
    codes = load_shared_16(slab + static_cast<std::uint32_t>(block * 2048 + thread * 16));
    asm volatile(
        "ld.shared.v2.u32 {%0, %1}, [%2];"
        : "=r"(strip[0]), "=r"(strip[1])
        : "r"(slab + kSlabRows * 32 + static_cast<std::uint32_t>(block * 256 + (thread >> 2) * 8))
        : "memory");
    MOESAIC_CUDA_FAULT(cuda_codes_have_the_scale_of_the_row_above, strip[1] = strip[0];)
    MOESAIC_CUDA_FAULT(cuda_codes_have_the_first_scale, strip[0] = (strip[0] & 0xFF) * 0x01010101U;
                       strip[1] = (strip[1] & 0xFF) * 0x01010101U;)
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    e2m1_fragment(words[step], a);
    if (step % 2 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        factors[r] = nvfp4_factors(pick_bytes(strip[r], 0, step == 0 ? 0x4140 : 0x4342));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = multiply_bf16x2(a[i], spread_half(factors[i & 1], step % 2));
  }
};

// e4m3 codes and E8M0 scales per 32.
struct DecodeMxfp8 {
  uint4 codes[2];  // of two steps each
  ThirtySecondFactors factors;

  __device__ __forceinline__ void load(std::uint32_t slab, int block, int thread) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[half] = load_shared_16(
          slab + static_cast<std::uint32_t>(block * 4096 + half * 2048 + thread * 16));
    }
    factors.load(slab + kSlabRows * 64, block, thread);
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
    const uint4& two = codes[step >> 1];
    std::uint32_t upper[2], lower[2];  // elements 2t of the step, and 2t + 8
    e4m3_pairs((step & 1) == 0 ? two.x : two.z, upper);
    e4m3_pairs((step & 1) == 0 ? two.y : two.w, lower);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = factors.times(step, i, i < 2 ? upper[i] : lower[i - 2]);
    }
  }
};

}  // namespace moesaic::cuda
