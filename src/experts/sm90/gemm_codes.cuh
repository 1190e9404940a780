// Weights that the grouped-GEMM kernel (grouped_gemm.cuh) decodes in registers: part `Weights` of a
// format (format_parts.h) whose image holds codes in fragment order (repack_codes.h). The weights
// are the M operand at every width.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_shapes_rs.cuh"
#include "experts/sm90/decode_bf16.cuh"
#include "experts/sm90/gemm_stages.cuh"

namespace moesaic::cuda {

template <class Decoder>
struct FromCodes {
  static constexpr bool kTokensAsRows = false;
  static constexpr bool kOddFirst = false;
  static constexpr bool kHasTable = requires { requires Decoder::kHasTable; };
  // Wide groups of sums that are taken out after each chunk: two chunks a stage are 5 % slower.
  template <class Promote>
  static constexpr int stage_chunks(int columns) {
    if constexpr (Promote::kParts) return columns > 48 && Promote::kMostStages == 1 ? 1 : 2;
    return 2;
  }
  // Decoding is a chain of latencies, longer than the multiplies of few columns: twice the warps.
  static constexpr int groups_of_slab(int columns) { return columns <= 48 ? 2 : 1; }

  // What a thread reads of the slab at a shared address: block m of its warpgroup.
  struct SlabOfStage {
    const CodeImage& image;
    int first, thread;    // block
    std::uint32_t table;  // shared address of a lane's, with kHasTable

    __device__ __forceinline__ void load_codes(Decoder& decoder, std::uint32_t at, int m) const {
      decoder.load_codes(at, first + m, thread);
    }
    __device__ __forceinline__ void load_zero_points(Decoder& decoder, std::uint32_t at,
                                                     int m) const {
      if constexpr (kHasTable) {
        decoder.table = table;
      } else {
        decoder.load_zero_points(image, at, first + m, thread);
      }
    }
    template <class Scales>
    __device__ __forceinline__ void load_scales(Scales& scales, std::uint32_t at, int m) const {
      scales.load(image, at, Decoder::kCodesBytes, first + m, thread);
    }
    // All of it.
    __device__ __forceinline__ void load(Decoder& decoder, std::uint32_t at, int m) const {
      if constexpr (requires { Decoder::kCodesBytes; }) {
        load_codes(decoder, at, m);
        load_scales(decoder.scales, at, m);
        load_zero_points(decoder, at, m);
      } else {
        decoder.load(at, first + m, thread);
      }
    }
  };

  // The products of the next stage, which has kCount chunks, in flight together. Steps are decoded
  // while the products of the two before are in flight; over a loop's end that gains nothing
  // (measured). With two blocks codes are read two steps before they are needed; with one there are
  // twice the warps, and it gains nothing (measured).
  template <int kCount, class Mma, class Stage, class Slab, int kBlocks, int kRegisters>
  static __device__ __forceinline__ void multiply_stage(Stage& stage, std::uint32_t weights,
                                                        std::uint32_t tokens, const Slab& slab,
                                                        float (&acc)[kBlocks][kRegisters]) {
    const Chunks<kCount> at = wait_for_chunks<kCount>(stage);
    std::uint64_t tiles[kCount];
#pragma unroll
    for (int s = 0; s < kCount; ++s) tiles[s] = ptx::wgmma_whole_descriptor(tokens + at.offset[s]);
    constexpr bool kAhead = kBlocks == 2;
    constexpr int kTurns = kBlocks * kCount, kSteps = 2;
    Decoder decoders[2];
    // Of turn `turn`: chunk turn % kCount of block turn / kCount.
    const auto load = [&](int turn) {
      slab.load(decoders[turn % 2], weights + (at.offset[turn % kCount] << 4), turn / kCount);
    };
    load(0);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (!kAhead && turn > 0) load(turn);
#pragma unroll
      for (int k = 0; k < 4; k += kSteps) {
        std::uint32_t a[kSteps][4];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) decoders[turn % 2].fragment(k + i, a[i]);
        if (kAhead && k == 0 && turn + 1 < kTurns) load(turn + 1);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          Mma::run(acc[turn / kCount], a[i],
                   tiles[turn % kCount] + static_cast<std::uint32_t>(k + i) * ptx::kWgmmaStep, 1);
        }
        ptx::wgmma_commit();
        if (turn + 1 < kTurns || k + kSteps < 4) ptx::wgmma_wait<1>();
      }
    }
    stage.peek();
    ptx::wgmma_wait<0>();
    stage.release_and_advance();
  }

  // The products of the chunks at `at`, added to acc times the scales of their rows, which are the
  // same in all of them. peek() is called while the last products are in flight.
  template <class Mma, int kCount, class Slab, int kBlocks, int kRegisters, class Peek>
  static __device__ __forceinline__ void add_chunks(const Chunks<kCount>& at, std::uint32_t weights,
                                                    std::uint32_t tokens, const Slab& slab,
                                                    const Peek& peek,
                                                    float (&acc)[kBlocks][kRegisters]) {
    constexpr bool kWide = kRegisters > 32;
    // Sums of all blocks, or in turn.
    constexpr int kSets = 1 + (kBlocks - 1) * static_cast<int>(kRegisters <= 24);
    decltype(Decoder::scales) scales[kBlocks];
    float part[kSets][kRegisters];
    const auto multiply = [&](int m, float(&d)[kRegisters]) {
      Decoder decoder;
      const auto fragment = [&](int s, int k, std::uint32_t(&a)[4]) {
        const std::uint32_t from = weights + (at.offset[s] << 4);
        if (s == 0 && k == 0) slab.load_zero_points(decoder, from, m);
        if (k == 0) slab.load_codes(decoder, from, m);
        decoder.fragment(k, a);
      };
      multiply_fragments<Mma, (kWide ? 1 : 2), 1>(at, tokens, fragment, d);
      slab.load_scales(scales[m], weights + (at.offset[0] << 4), m);
    };
    const auto promote = [&](int m, const float(&from)[kRegisters]) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        acc[m][i] = fmaf(from[i], scales[m].of_row[(i & 2) != 0 ? 1 : 0], acc[m][i]);
      }
    };
    multiply(0, part[0]);
    if constexpr (kSets == 2) multiply(1, part[1]);
    // Of all products: with some in flight the compiler would copy the sums.
    if constexpr (kBlocks == 2) {
      ptx::wgmma_wait<0>();
      promote(0, part[0]);
      if constexpr (kSets == 1) multiply(1, part[0]);
    }
    peek();
    ptx::wgmma_wait<0>();
    promote(kBlocks - 1, part[kSets - 1]);
  }

  // The chunks of the next stage, which has two with the same scales.
  template <class Mma, class Stage, class Slab, int kBlocks, int kRegisters>
  static __device__ __forceinline__ void add_both(Stage& stage, std::uint32_t weights,
                                                  std::uint32_t tokens, const Slab& slab,
                                                  float (&acc)[kBlocks][kRegisters]) {
    add_chunks<Mma>(
        wait_for_chunks<2>(stage), weights, tokens, slab, [&] { stage.peek(); }, acc);
    stage.release_and_advance();
  }

  // The two chunks of the next stage in turn.
  template <class Mma, class Stage, class Slab, int kBlocks, int kRegisters>
  static __device__ __forceinline__ void add_each(Stage& stage, std::uint32_t weights,
                                                  std::uint32_t tokens, const Slab& slab,
                                                  float (&acc)[kBlocks][kRegisters]) {
    const Chunks<2> at = wait_for_chunks<2>(stage);
    add_chunks<Mma>(
        Chunks<1>{{at.offset[0]}}, weights, tokens, slab, [] {}, acc);
    add_chunks<Mma>(
        Chunks<1>{{at.offset[1]}}, weights, tokens, slab, [&] { stage.peek(); }, acc);
    stage.release_and_advance();
  }

  // The chunks of the next stage in turn: two, or one. Fewer registers.
  template <class Mma, class Stage, class Slab, int kBlocks, int kRegisters>
  static __device__ __forceinline__ void add_in_turn(Stage& stage, bool two, std::uint32_t weights,
                                                     std::uint32_t tokens, const Slab& slab,
                                                     float (&acc)[kBlocks][kRegisters]) {
    Chunks<1> at = wait_for_chunks<1>(stage);
    while (true) {
      const auto peek = [&] {
        if (!two) stage.peek();
      };
      add_chunks<Mma>(at, weights, tokens, slab, peek, acc);
      if (!two) break;
      two = false;
      at.offset[0] += Stage::L::kPartBytes >> 4;
    }
    stage.release_and_advance();
  }

  // Blocks of 64 rows from `first` on: as FromShared::columns, with InOperand or PerStagesAndRow.
  // A stage has two chunks, because what stands between stages and waiting for the last products of
  // each is much of the time; the last has one where their number is odd.
  template <class Format, class Tile, int kColumns, int kBlocks>
  static __device__ __forceinline__ void blocks(const Shared<Format, Tile>& sh,
                                                RingPosition<Layout<Format, Tile>::kStages>& ring,
                                                int chunks, int group, int first, int lane,
                                                float (&acc)[kBlocks][kColumns / 2]) {
    using L = Layout<Format, Tile>;
    using Mma = ptx::WgmmaFromRegisters<typename Format::Product, kColumns>;
    StageReader<Format, Tile> stage{sh, ring, lane};
    const int thread = static_cast<int>(threadIdx.x) & 127;
    const std::uint32_t weights =
        sh.weights(0) + static_cast<std::uint32_t>(L::kSplit ? 0 : group) *
                            static_cast<std::uint32_t>(L::slab_bytes(sh.codes));
    const std::uint32_t tokens = ptx::wgmma_tile(sh.tokens(0));
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) acc[m][i] = 0;
    }
    const SlabOfStage slab{sh.codes, first, thread,
                           sh.table() + static_cast<std::uint32_t>(lane) * 4};
    if constexpr (Format::Promote::kParts) {
      if constexpr (Format::Promote::kMostStages == 2) {
        if (sh.chunks_of_sums == 2) {
          for (int c = chunks / 2; c > 0; --c) add_both<Mma>(stage, weights, tokens, slab, acc);
          chunks &= 1;
        }
      }
      if constexpr (L::kStageChunks == 1) {
        for (; chunks > 0; --chunks) {
          add_in_turn<Mma>(stage, false, weights, tokens, slab, acc);
        }
      } else if constexpr (Format::Promote::kMostStages == 1) {
        for (; chunks > 1; chunks -= 2) add_each<Mma>(stage, weights, tokens, slab, acc);
        if (chunks > 0) add_in_turn<Mma>(stage, false, weights, tokens, slab, acc);
      } else {
        // One loop: with more of them the compiler spills sums.
        for (; chunks > 0; chunks -= 2) {
          add_in_turn<Mma>(stage, chunks > 1, weights, tokens, slab, acc);
        }
      }
    } else {
      if constexpr (L::kStageChunks == 2) {
        for (int c = chunks / 2; c > 0; --c) {
          multiply_stage<2, Mma>(stage, weights, tokens, slab, acc);
        }
        chunks %= 2;
      }
      for (; chunks > 0; --chunks) multiply_stage<1, Mma>(stage, weights, tokens, slab, acc);
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
