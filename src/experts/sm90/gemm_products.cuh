// The products of the grouped-GEMM kernel (grouped_gemm.cuh): what consumer warpgroups do with the
// stages of an item, in either orientation. Parts `Weights` and `Promote` of a format
// (format_parts.h).
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "experts/sm90/gemm_stages.cuh"

namespace moesaic::cuda {

// Sum: type of an accumulator. kParts: stages' sums are taken out of it, of kIntervalStages at a
// time.
struct InOperand {
  using Sum = float;
  static constexpr bool kParts = false;
};

struct Integers {
  using Sum = std::int32_t;
  static constexpr bool kParts = false;
};

template <int kStages>
struct PerStages {
  using Sum = float;
  static constexpr bool kParts = true;
  static constexpr int kIntervalStages = kStages;
  static_assert(kStages == 2);
};

struct PerStage {
  using Sum = float;
  static constexpr bool kParts = true;
  static constexpr int kIntervalStages = 1;
  // Where a stage has a token's scale.
  static __device__ __forceinline__ std::uint32_t at_token(std::uint32_t row) {
    return BlockWeightScales::kStageBytes + GroupScaledRows::kScaleBytes * row;
  }
};

template <int kStages>
struct PerStagesAndRow {
  using Sum = float;
  static constexpr bool kParts = true;
  static constexpr int kMostStages = kStages;
  static_assert(kStages <= 2);
};

struct FromShared {
  static constexpr bool kTokensAsRows = true;  // full groups
  static constexpr bool kOddFirst = false;
  template <class>
  static constexpr int stage_chunks(int) {
    return 1;
  }
  static constexpr int groups_of_slab(int) { return 1; }

  // The four K steps of a stage: d = or += a b^T.
  template <class Mma, class Sum, int kRegisters>
  static __device__ __forceinline__ void multiply_stage(Sum (&d)[kRegisters], std::uint32_t a,
                                                        std::uint32_t b, bool accumulate) {
    const std::uint64_t tile_a = ptx::wgmma_whole_descriptor(a);
    const std::uint64_t tile_b = ptx::wgmma_whole_descriptor(b);
#pragma unroll
    for (std::uint32_t k = 0; k < 4; ++k) {
      Mma::run(d, tile_a + k * ptx::kWgmmaStep, tile_b + k * ptx::kWgmmaStep,
               accumulate || k > 0 ? 1 : 0);
    }
  }

  // `chunks` stages that need no scales: a stage's products stay in flight while the next one's are
  // issued. issue(offset) issues those of the stage at `offset`.
  template <class Stage, class Issue>
  static __device__ __forceinline__ void accumulate_stages(Stage& stage, int chunks,
                                                           const Issue& issue) {
    std::uint32_t previous = 0;
    for (int c = 0; c < chunks; ++c) {
      stage.wait();
      issue(stage.offset());
      ptx::wgmma_commit();
      stage.peek();
      ptx::wgmma_wait<1>();
      if (c > 0) stage.release(previous);
      previous = stage.ring.slot();
      stage.ring.advance();
    }
    ptx::wgmma_wait<0>();
    stage.release(previous);
  }

  // `chunks` stages of which two at a time are summed up: take(offsets, release) issues and waits for the
  // products of the stages at both offsets, and calls release when those of the first are done: the ring
  // has no more than four. An odd number begins with one alone: first(offset).
  template <class Stage, class First, class Take>
  static __device__ __forceinline__ void take_pairs(Stage& stage, int chunks, const First& first,
                                                    const Take& take) {
    if (chunks % 2 != 0) {
      stage.wait();
      first(stage.offset());
      stage.release(stage.ring.slot());
      stage.ring.advance();
      stage.ready = false;
    }
    for (int c = chunks % 2; c < chunks; c += 2) {
      std::uint32_t offset[2];
      stage.wait();
      offset[0] = stage.offset();
      const std::uint32_t slot = stage.ring.slot();
      stage.ring.advance();
      stage.ready = false;
      stage.wait();
      offset[1] = stage.offset();
      take(offset, [&] { stage.release(slot); });
      stage.release(stage.ring.slot());
      stage.ring.advance();
    }
  }

  // d = a b^T over two stages, one group of products each.
  template <class Mma, int kRegisters>
  static __device__ __forceinline__ void multiply_pair(float (&d)[kRegisters], std::uint32_t a,
                                                       std::uint32_t b,
                                                       const std::uint32_t (&offset)[2]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      multiply_stage<Mma>(d, a + offset[s], b + offset[s], s > 0);
      ptx::wgmma_commit();
    }
  }
  template <int kRegisters>
  static __device__ __forceinline__ void add(float* to, const float (&part)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) to[i] += part[i];
  }

  // Weights as the M operand. acc[b] holds rows b * 64 .. of the warpgroup's slab: element 4j + i
  // is row g, column 8j + 2t + i, element 4j + 2 + i row g + 8, with g = lane / 4, t = lane % 4 and
  // 16 rows per warp.
  template <class Format, class Tile, int kColumns>
  static __device__ __forceinline__ void columns(
      const Shared<Format, Tile>& sh, RingPosition<Layout<Format, Tile>::kStages>& ring, int chunks,
      int group, int lane, bool scale_by_row_half,
      typename Format::Promote::Sum (&acc)[2][kColumns / 2]) {
    using L = Layout<Format, Tile>;
    using Promote = typename Format::Promote;
    using Mma = ptx::Wgmma<typename Format::Product, kColumns>;
    constexpr std::uint32_t kBlockStep = 8192 >> 4;  // 64 rows of A
    StageReader<Format, Tile> stage{sh, ring, lane};
    const std::uint32_t weights = ptx::wgmma_tile(
        sh.weights(0) + static_cast<std::uint32_t>(L::kSplit ? 0 : group) * L::kSlabBytes);
    const std::uint32_t tokens = ptx::wgmma_tile(sh.tokens(0));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) acc[m][i] = 0;
    }
    if constexpr (!Promote::kParts) {
      accumulate_stages(stage, chunks, [&](std::uint32_t offset) {
        const std::uint32_t a = weights + offset, b = tokens + offset;
        ptx::wgmma_fence();
        multiply_stage<Mma>(acc[0], a, b, true);
        multiply_stage<Mma>(acc[1], a + kBlockStep, b, true);
      });
    } else if constexpr (Promote::kIntervalStages > 1) {
      constexpr int kSets = kColumns <= 64 ? 2 : 1;  // accumulators of both blocks, or in turn
      const auto first = [&](std::uint32_t offset) {
        ptx::wgmma_fence();
        multiply_stage<Mma>(acc[0], weights + offset, tokens + offset, false);
        multiply_stage<Mma>(acc[1], weights + offset + kBlockStep, tokens + offset, false);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
      };
      take_pairs(stage, chunks, first, [&](const std::uint32_t(&offset)[2], const auto& release) {
        float part[kSets][kColumns / 2];
        ptx::wgmma_fence();
        multiply_pair<Mma>(part[0], weights, tokens, offset);
        if constexpr (kSets == 2) multiply_pair<Mma>(part[1], weights + kBlockStep, tokens, offset);
        stage.peek();
        ptx::wgmma_wait<2 * (kSets - 1)>();
        add(acc[0], part[0]);
        if constexpr (kSets == 1) {
          ptx::wgmma_fence();
          multiply_pair<Mma>(part[0], weights + kBlockStep, tokens, offset);
        }
        ptx::wgmma_wait<1>();
        release();
        ptx::wgmma_wait<0>();
        add(acc[1], part[kSets - 1]);
      });
    } else {
      constexpr int kSets = kColumns <= 64 ? 2 : 1;  // accumulators of both blocks, or in turn
      for (int c = 0; c < chunks; ++c) {
        stage.wait();
        const std::uint32_t offset = stage.offset();
        const std::uint32_t a = weights + offset, b = tokens + offset;
        const float* scales = sh.scale_ptr(ring.slot());
        const float2* token_scales = reinterpret_cast<const float2*>(scales + 4) + (lane & 3);
        float lo = 0.0F, hi = 0.0F;
        float part[kSets][kColumns / 2];
        const auto promote = [&](float(&to)[kColumns / 2], const float(&from)[kColumns / 2]) {
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            const float2 s = token_scales[j * 4];
            to[4 * j] = fmaf(from[4 * j], s.x * lo, to[4 * j]);
            to[4 * j + 1] = fmaf(from[4 * j + 1], s.y * lo, to[4 * j + 1]);
            to[4 * j + 2] = fmaf(from[4 * j + 2], s.x * hi, to[4 * j + 2]);
            to[4 * j + 3] = fmaf(from[4 * j + 3], s.y * hi, to[4 * j + 3]);
          }
        };
        ptx::wgmma_fence();
        multiply_stage<Mma>(part[0], a, b, false);
        ptx::wgmma_commit();
        if constexpr (kSets == 2) {
          multiply_stage<Mma>(part[1], a + kBlockStep, b, false);
          ptx::wgmma_commit();
        }
        // Two scales per stage: of the row halves (gate and up rows), or of the two slabs.
        lo = scales[scale_by_row_half ? 0 : group];
        hi = scales[scale_by_row_half ? 1 : group];
        MOESAIC_CUDA_FAULT(cuda_experts_weight_scale_missing, lo = hi = 1.0F;)
        MOESAIC_CUDA_FAULT(cuda_experts_up_rows_have_the_scale_of_gate_rows, hi = lo;)
        stage.peek();
        ptx::wgmma_wait<kSets - 1>();
        promote(acc[0], part[0]);
        if constexpr (kSets == 1) {
          ptx::wgmma_fence();
          multiply_stage<Mma>(part[0], a + kBlockStep, b, false);
          ptx::wgmma_commit();
        }
        ptx::wgmma_wait<0>();
        promote(acc[1], part[kSets - 1]);
        stage.release(ring.slot());
        ring.advance();
      }
    }
  }

  // Tokens as the M operand: a warpgroup has 64 token rows and all 256 weight rows of the band.
  // Scales cost two registers per token row instead of two loads and four products per column,
  // which is what makes this orientation faster for full groups. Element 64 h + 4j + i of acc is
  // token row g, weight row 128 h + 8j + 2t + i of the band; element 64 h + 4j + 2 + i is token row
  // g + 8, with g = lane / 4, t = lane % 4. `row` is the thread's first token row in the tile.
  template <class Format, class Tile>
  static __device__ __forceinline__ void rows(const Shared<Format, Tile>& sh,
                                              RingPosition<Layout<Format, Tile>::kStages>& ring,
                                              int chunks, int group, int row, int lane,
                                              bool scale_by_row_half,
                                              typename Format::Promote::Sum (&acc)[128]) {
    using L = Layout<Format, Tile>;
    using Product = typename Format::Product;
    using Promote = typename Format::Promote;
    StageReader<Format, Tile> stage{sh, ring, lane};
    const std::uint32_t tokens =
        ptx::wgmma_tile(sh.tokens(0) + static_cast<std::uint32_t>(group) * 8192);
    const std::uint32_t weights = ptx::wgmma_tile(sh.weights(0));
    // Through a shuffle, whose result the compiler keeps in a register; it would compute the plain
    // expression again in every stage.
    const std::uint32_t row_scale =
        __shfl_sync(0xFFFFFFFFU, PerStage::at_token(static_cast<std::uint32_t>(row)), lane);
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = 0;
    if constexpr (!Promote::kParts) {
      accumulate_stages(stage, chunks, [&](std::uint32_t offset) {
        ptx::wgmma_fence();
        multiply_stage<ptx::Wgmma<Product, 256>>(acc, tokens + offset, weights + offset, true);
      });
    } else if constexpr (Promote::kIntervalStages > 1) {
      using Mma = ptx::Wgmma<Product, 128>;
      constexpr std::uint32_t kSlab = L::kSlabBytes >> 4;
      const auto first = [&](std::uint32_t offset) {
        const std::uint32_t a = tokens + offset, b = weights + offset;
        ptx::wgmma_fence();
        multiply_stage<Mma>(reinterpret_cast<float(&)[64]>(acc[0]), a, b, false);
        multiply_stage<Mma>(reinterpret_cast<float(&)[64]>(acc[64]), a, b + kSlab, false);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
      };
      take_pairs(stage, chunks, first, [&](const std::uint32_t(&offset)[2], const auto& release) {
        float part[64];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ptx::wgmma_fence();
          multiply_pair<Mma>(part, tokens, weights + (h == 0 ? 0 : kSlab), offset);
          if (h == 1) {
            stage.peek();
            ptx::wgmma_wait<1>();
            release();
          }
          ptx::wgmma_wait<0>();
          add(acc + 64 * h, part);
        }
      });
    } else {
      for (int c = 0; c < chunks; ++c) {
        stage.wait();
        const std::uint32_t offset = stage.offset();
        const std::uint32_t a = tokens + offset, b = weights + offset;
        const std::uint32_t scales = sh.scales(ring.slot());
        const float lo = ptx::load_shared_f32(scales + row_scale);
        const float hi = ptx::load_shared_f32(scales + row_scale + 32);
        const float first = ptx::load_shared_f32(scales);
        const float other = ptx::load_shared_f32(scales + 4);
        float part[64];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ptx::wgmma_fence();
          multiply_stage<ptx::Wgmma<Product, 128>>(
              part, a, b + static_cast<std::uint32_t>(h * (L::kSlabBytes >> 4)), false);
          ptx::wgmma_commit();
          if (h == 1) stage.peek();
          // Gate and up chunks alternate, or the slab decides.
          const float w0 = scale_by_row_half || h == 0 ? first : other;
          float w1 = scale_by_row_half ? other : w0;
          MOESAIC_CUDA_FAULT(cuda_experts_full_groups_have_one_scale, w1 = first;)
          const float lo0 = lo * w0, hi0 = hi * w0, lo1 = lo * w1, hi1 = hi * w1;
          ptx::wgmma_wait<0>();
          if (h == 1) stage.release(ring.slot());
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            const float fl = (j & 1) != 0 ? lo1 : lo0, fh = (j & 1) != 0 ? hi1 : hi0;
            const int at = 64 * h + 4 * j;
            acc[at] = fmaf(part[4 * j], fl, acc[at]);
            acc[at + 1] = fmaf(part[4 * j + 1], fl, acc[at + 1]);
            acc[at + 2] = fmaf(part[4 * j + 2], fh, acc[at + 2]);
            acc[at + 3] = fmaf(part[4 * j + 3], fh, acc[at + 3]);
          }
        }
        ring.advance();
      }
    }
  }
};

}  // namespace moesaic::cuda
