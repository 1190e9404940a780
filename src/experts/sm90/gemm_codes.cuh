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

  // The products of the next kCount stages, in flight together. A step is decoded while the products
  // of the two before are in flight; over a loop's end the compiler would not let them be.
  template <int kCount, class Mma, class Stage, class Load, int kRegisters>
  static __device__ __forceinline__ void multiply_stages(Stage& stage, std::uint32_t weights,
                                                         std::uint32_t tokens, const Load& load,
                                                         float (&acc)[2][kRegisters]) {
    std::uint32_t slot[kCount], offset[kCount];
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      stage.wait();
      slot[s] = stage.ring.slot;
      offset[s] = stage.offset();
      if (s + 1 == kCount) break;
      stage.ring.advance();
      stage.ready = false;
    }
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Decoder decoder;
        load(decoder, weights + (offset[s] << 4), m);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          std::uint32_t a[4];
          decoder.fragment(k, a);
          ptx::wgmma_fence();
          Mma::run(acc[m], a,
                   ptx::wgmma_descriptor(tokens + offset[s] +
                                         static_cast<std::uint32_t>(k) * ptx::kWgmmaStep),
                   1);
          ptx::wgmma_commit();
          if (s + 1 < kCount || m == 0 || k < 3) ptx::wgmma_wait<2>();
        }
      }
    }
    stage.peek();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int s = 0; s < kCount; ++s) stage.release(slot[s]);
    stage.ring.advance();
  }

  // The products of the next stage, added to acc times the scales of their rows.
  template <class Mma, class Stage, class Load, int kRegisters>
  static __device__ __forceinline__ void add_stage(Stage& stage, std::uint32_t weights,
                                                   std::uint32_t tokens, const Load& load,
                                                   float (&acc)[2][kRegisters]) {
    constexpr int kSets = kRegisters <= 32 ? 2 : 1;  // sums of both blocks, or in turn
    stage.wait();
    const std::uint32_t offset = stage.offset();
    Decoder decoder[2];
    float part[kSets][kRegisters];
    const auto multiply = [&](int m, float(&d)[kRegisters]) {
      load(decoder[m], weights + (offset << 4), m);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        std::uint32_t a[4];
        decoder[m].fragment(k, a);
        ptx::wgmma_fence();
        Mma::run(d, a,
                 ptx::wgmma_descriptor(tokens + offset +
                                       static_cast<std::uint32_t>(k) * ptx::kWgmmaStep),
                 k > 0 ? 1 : 0);
        ptx::wgmma_commit();
        if (k < 3) ptx::wgmma_wait<(kSets == 1 ? 1 : 2)>();
      }
    };
    const auto promote = [&](int m, const float(&from)[kRegisters]) {
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        acc[m][i] = fmaf(from[i], decoder[m].scales.of_row[(i & 2) != 0 ? 1 : 0], acc[m][i]);
      }
    };
    multiply(0, part[0]);
    if constexpr (kSets == 2) multiply(1, part[1]);
    // Of all products: with some in flight the compiler would copy the sums.
    ptx::wgmma_wait<0>();
    promote(0, part[0]);
    if constexpr (kSets == 1) multiply(1, part[0]);
    stage.peek();
    ptx::wgmma_wait<0>();
    promote(1, part[kSets - 1]);
    stage.release(stage.ring.slot);
    stage.ring.advance();
  }

  // As FromShared::columns, with InOperand or PerStageAndRow. InOperand and few columns: two stages at
  // a time, because waiting for the last products of each is then much of the time.
  template <class Format, class Tile, int kColumns>
  static __device__ __forceinline__ void columns(const Shared<Format, Tile>& sh,
                                                 RingPosition<Layout<Format, Tile>::kStages>& ring,
                                                 int chunks, int group, int lane, bool,
                                                 float (&acc)[2][kColumns / 2]) {
    using L = Layout<Format, Tile>;
    using Mma = ptx::WgmmaFromRegisters<typename Format::Product, kColumns>;
    StageReader<Format, Tile> stage{sh, ring, lane};
    const int thread = static_cast<int>(threadIdx.x) & 127;
    const std::uint32_t weights =
        sh.weights(0) + static_cast<std::uint32_t>(L::kSplit ? 0 : group) *
                            static_cast<std::uint32_t>(L::slab_bytes(sh.codes));
    const std::uint32_t tokens = ptx::wgmma_tile(sh.tokens(0));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) acc[m][i] = 0;
    }
    const auto load = [&](Decoder& decoder, std::uint32_t at, int m) {
      if constexpr (L::kVaries) {
        decoder.load(sh.codes, at, m, thread);
      } else {
        decoder.load(at, m, thread);
      }
    };
    if constexpr (Format::Promote::kParts) {
      for (int c = 0; c < chunks; ++c) add_stage<Mma>(stage, weights, tokens, load, acc);
      return;
    }
    constexpr int kTogether = kColumns <= 32 ? 2 : 1;
    if (kTogether == 2 && chunks % 2 != 0) {
      multiply_stages<1, Mma>(stage, weights, tokens, load, acc);
    }
    for (int c = chunks / kTogether; c > 0; --c) {
      multiply_stages<kTogether, Mma>(stage, weights, tokens, load, acc);
    }
  }
};

}  // namespace moesaic::cuda
