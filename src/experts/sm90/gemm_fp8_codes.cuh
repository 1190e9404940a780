// 4-bit weights that the grouped-GEMM kernel (grouped_gemm.cuh) decodes in registers to e4m3: part
// `Weights` of a format (format_parts.h). As gemm_codes.cuh, with k32 steps; the sums of two chunks
// are added up in fp32, because the accumulator of e4m3 products has 13 fraction bits and truncates.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_shapes_rs.cuh"
#include "experts/sm90/codes_int4_fp8.h"
#include "experts/sm90/decode_bf16.cuh"
#include "experts/sm90/gemm_products.cuh"
#include "experts/sm90/gemm_stages.cuh"

namespace moesaic::cuda {

// A thread's codes and scales of 64 rows and 128 elements of K. Image: repack_codes.h.
struct DecodeInt4Fp8 {
  uint4 codes;      // of two steps: of row g, then of row g + 8
  uint4 multiples;  // Int4Multiples of both rows
  Int4Multiples of_row[2];
  std::uint32_t two;  // int4_fp8_pair

  __device__ __forceinline__ void load_scales(std::uint32_t slab, int block, int thread) {
    multiples = load_shared_16(slab + kSlabRows * 64 +
                               static_cast<std::uint32_t>(block * 512 + (thread >> 2) * 16));
  }
  // Of the chunk that follows.
  __device__ __forceinline__ void take_scales() {
    of_row[0] = {multiples.x, multiples.y};
    of_row[1] = {multiples.z, multiples.w};
    MOESAIC_CUDA_FAULT(cuda_codes_have_the_scale_of_the_row_above, of_row[1] = of_row[0];)
  }
  // Of steps 2 half and 2 half + 1.
  static __device__ __forceinline__ uint4 load_codes(std::uint32_t slab, int block, int half,
                                                     int thread) {
    return load_shared_16(slab +
                          static_cast<std::uint32_t>(block * 4096 + half * 2048 + thread * 16));
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
    int4_fp8_pair((step & 1) == 0 ? codes.x : codes.z, of_row[0], a[0], a[2], two);
    int4_fp8_pair((step & 1) == 0 ? codes.y : codes.w, of_row[1], a[1], a[3], two);
  }
};

// Through a shuffle, which the compiler does not see through.
__device__ __forceinline__ std::uint32_t hidden_two(int lane) {
  return __shfl_sync(0xFFFFFFFFU, 2U, lane);
}

template <class Decoder>
struct FromFp8Codes {
  static constexpr bool kTokensAsRows = false;
  static constexpr bool kOddFirst = true;
  template <class>
  static constexpr int stage_chunks(int) {
    return 2;
  }
  // Byte permutations bound this decoder, not latencies: more warps are no faster.
  static constexpr int groups_of_slab(int) { return 1; }

  // The products of the next stage, which has kCount chunks, added to acc. Blocks of 64 rows from
  // `first` on.
  template <int kCount, class Mma, class Stage, int kBlocks, int kRegisters>
  static __device__ __forceinline__ void add_stage(Stage& stage, std::uint32_t weights,
                                                   std::uint32_t tokens, int first, int thread,
                                                   std::uint32_t two,
                                                   float (&acc)[kBlocks][kRegisters]) {
    const Chunks<kCount> at = wait_for_chunks<kCount>(stage);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      float part[kRegisters];
      Decoder decoder;
      decoder.two = two;
      uint4 next;
      const auto load_codes = [&](int half) {
        const std::uint32_t slab = weights + (at.offset[half / 2] << 4);
        return Decoder::load_codes(slab, first + m, half % 2, thread);
      };
      decoder.load_scales(weights + (at.offset[0] << 4), first + m, thread);
      next = load_codes(0);
      const auto fragment = [&](int s, int k, std::uint32_t(&a)[4]) {
        if (k == 0) decoder.take_scales();
        if (k % 2 == 0) decoder.codes = next;
        decoder.fragment(k, a);
        // What the step after the next one needs.
        const int half = 2 * s + k / 2 + 1;
        if (k % 2 != 0 || half == 2 * kCount) return;
        next = load_codes(half);
        if (half % 2 == 0) {
          decoder.load_scales(weights + (at.offset[half / 2] << 4), first + m, thread);
        }
      };
      multiply_fragments<Mma, 1, (kRegisters == 16 ? 0 : 1)>(at, tokens, fragment, part);
      if (m + 1 == kBlocks) stage.peek();
      ptx::wgmma_wait<0>();
      FromShared::add(acc[m], part);
    }
    stage.release_and_advance();
  }

  // As FromCodes::blocks.
  template <class Format, class Tile, int kColumns, int kBlocks>
  static __device__ __forceinline__ void blocks(const Shared<Format, Tile>& sh,
                                                RingPosition<Layout<Format, Tile>::kStages>& ring,
                                                int chunks, int group, int first, int lane,
                                                float (&acc)[kBlocks][kColumns / 2]) {
    using L = Layout<Format, Tile>;
    using Mma = ptx::WgmmaFromRegisters<typename Format::Product, kColumns>;
    static_assert(Format::Promote::kParts && Format::Promote::kIntervalStages == 2);
    StageReader<Format, Tile> stage{sh, ring, lane};
    const int thread = static_cast<int>(threadIdx.x) & 127;
    const std::uint32_t weights =
        sh.weights(0) + static_cast<std::uint32_t>(L::kSplit ? 0 : group) * L::kSlabBytes;
    const std::uint32_t tokens = ptx::wgmma_tile(sh.tokens(0));
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) acc[m][i] = 0;
    }
    const std::uint32_t two = hidden_two(lane);
    if (chunks % 2 != 0) add_stage<1, Mma>(stage, weights, tokens, first, thread, two, acc);
    for (int c = chunks / 2; c > 0; --c) {
      add_stage<2, Mma>(stage, weights, tokens, first, thread, two, acc);
    }
  }

  // As FromShared::columns.
  template <class Format, class Tile, int kColumns>
  static __device__ __forceinline__ void columns(const Shared<Format, Tile>& sh,
                                                 RingPosition<Layout<Format, Tile>::kStages>& ring,
                                                 int chunks, int group, int lane, bool,
                                                 float (&acc)[2][kColumns / 2]) {
    blocks<Format, Tile, kColumns>(sh, ring, chunks, group, 0, lane, acc);
  }
};

}  // namespace moesaic::cuda
