// The consumer warpgroups of the grouped-GEMM kernel (grouped_gemm.cuh): multiply-accumulate in
// either orientation, then the epilogue of an item.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "experts/sm90/epilogue.cuh"
#include "experts/sm90/gemm_full_groups.cuh"
#include "experts/sm90/gemm_stages.cuh"
#include "permute/sm90/combine.cuh"

namespace moesaic::cuda {

// acc[b] holds rows b * 64 .. of the warpgroup's slab: element 4j + i is row g, column 8j + 2t + i,
// element 4j + 2 + i row g + 8, with g = lane / 4, t = lane % 4 and 16 rows per warp.
template <class Operand, int kMaxColumns, bool kPaired, int kColumns>
__device__ __forceinline__ void multiply(const Shared<Operand, kMaxColumns, kPaired>& sh,
                                         RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring,
                                         int chunks, int group, int lane, bool scale_by_row_half,
                                         float (&acc)[2][kColumns / 2]) {
  using L = Layout<Operand, kMaxColumns>;
  using Mma = ptx::Wgmma<Operand, kColumns>;
  constexpr std::uint32_t kBlockStep = 8192 >> 4;  // 64 rows of A
  StageReader<Operand, kMaxColumns, kPaired> stage{sh, ring, lane};
  const std::uint32_t weights = ptx::wgmma_tile(
      sh.weights(0) + static_cast<std::uint32_t>(L::kSplit ? 0 : group) * kSlabBytes);
  const std::uint32_t tokens = ptx::wgmma_tile(sh.tokens(0));
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[m][i] = 0.0F;
  }
  if constexpr (!L::kScaled) {
    accumulate_stages(stage, chunks, [&](std::uint32_t offset) {
      const std::uint32_t a = weights + offset, b = tokens + offset;
      ptx::wgmma_fence();
      multiply_stage<Mma>(acc[0], a, b, true);
      multiply_stage<Mma>(acc[1], a + kBlockStep, b, true);
    });
  } else {
    constexpr int kSets = kColumns <= 64 ? 2 : 1;  // accumulators of both blocks, or in turn
    for (int c = 0; c < chunks; ++c) {
      stage.wait();
      const std::uint32_t offset = stage.offset();
      const std::uint32_t a = weights + offset, b = tokens + offset;
      const float* scales = sh.scale_ptr(ring.slot);
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
      stage.release(ring.slot);
      ring.advance();
    }
  }
}

// The consumer threads, after the stores of a GEMM2 item: the last item of a band (split builds: of
// a slab) sums its columns of every token.
template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void combine_band(const GroupedParams& p,
                                             const Shared<Operand, kMaxColumns, kPaired>& sh,
                                             int band, int group) {
  using L = Layout<Operand, kMaxColumns>;
  constexpr int kThreads = L::kConsumerThreads;
  constexpr int kRows = L::kSplit ? kBandRows / 2 : kBandRows;
  constexpr int kTokenThreads = kRows / 8;
  const int part = L::kSplit ? 2 * band + group : band;
  const int thread = static_cast<int>(threadIdx.x);
  ptx::named_barrier_sync(kRequantBarrier, kThreads);
  if (thread == 0) {
    *sh.flag() = ptx::add_acq_rel(p.band_done + part, 1) + 1 == sh.num_groups(p) ? 1 : 0;
  }
  ptx::named_barrier_sync(kRequantBarrier, kThreads);
  if (*sh.flag() == 0) return;
  const std::int64_t column = static_cast<std::int64_t>(part) * kRows + thread % kTokenThreads * 8;
  if (column >= p.hidden) return;
  const CombineParams c = sh.combine(p);
  for (std::int64_t t = thread / kTokenThreads; t < c.tokens; t += kThreads / kTokenThreads)
    combine_columns(c, t, column);
}

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired, int kColumns>
__device__ __forceinline__ void consume_item(
    const GroupedParams& p, const Shared<Operand, kMaxColumns, kPaired>& sh,
    RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring, RingPosition<2>& exchange,
    const Item& item, int group, int warp, int lane) {
  using L = Layout<Operand, kMaxColumns>;
  const bool second = item.band >= p.bands1;
  constexpr int kLists = (kColumns + 31) / 32;
  float acc[2][kColumns / 2];
  if (second) {
    // Destination and factor of column `lane + 32 i`, asked for early.
    std::int32_t pair[kLists];
    float factor[kLists];
    const std::int32_t* const pair_of_row = sh.pair_of_row(p);
    const float* const weight_of_row = sh.weight_of_row(p);
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      const int column = lane + 32 * i;
      const bool valid = column < item.rows;
      pair[i] = valid ? pair_of_row[item.first_row + column] : -1;
      factor[i] = valid && weight_of_row != nullptr ? weight_of_row[item.first_row + column] : 1.0F;
    }
    multiply<Operand, kMaxColumns, kPaired, kColumns>(sh, ring, p.chunks2, group, lane, false, acc);
    store_weighted<kColumns>(p, item.expert, item.band - p.bands1, group, warp & 3, lane, pair,
                             factor, acc);
    if (!kPaired && kMaxColumns <= 64 && p.fold_combine)
      combine_band(p, sh, item.band - p.bands1, group);
  } else {
    multiply<Operand, kMaxColumns, kPaired, kColumns>(sh, ring, p.chunks1, group, lane,
                                                      kEpilogue != EpilogueKind::kPlain, acc);
    const AmaxExchange<L::kSplit> amax(sh, exchange);
    store_activated<Operand, kEpilogue, kColumns>(p, item.expert, item.band, item.first_row,
                                                  item.rows, group, warp & 3, lane, amax, acc);
    __syncwarp();
    if (lane == 0) ptx::add_release(p.group_done + item.group, 1);
  }
}

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired>
__device__ __forceinline__ void consume(const GroupedParams& p,
                                        const Shared<Operand, kMaxColumns, kPaired>& sh, int warp,
                                        int lane) {
  using L = Layout<Operand, kMaxColumns>;
  RingPosition<L::kStages> ring;
  RingPosition<kItemSlots> slot;
  RingPosition<2> exchange;
  // Lane 0's: so the compiler sees that the warp agrees.
  const int group = __shfl_sync(
      0xFFFFFFFFU, L::kSplit ? static_cast<int>(ptx::cluster_cta_rank()) : warp >> 2, 0);
  if (!kPaired && kMaxColumns <= 64 && p.fold_combine && sh.num_groups(p) == 0) {
    // Nobody has work, but every output must be written.
    const std::int64_t vectors = p.hidden / 8;
    constexpr int kThreads = L::kConsumerThreads;
    const CombineParams combine = sh.combine(p);
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
         i < combine.tokens * vectors; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
      combine_columns(combine, i / vectors, i % vectors * 8);
    }
  }
  while (true) {
    ptx::mbarrier_wait(sh.item_full(slot.slot), slot.parity);
    const Item item = sh.items()[slot.slot];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sh.item_empty(slot.slot));
    slot.advance();
    if (item.band < 0) break;
    const auto with = [&](auto columns) {
      consume_item<Operand, kMaxColumns, kEpilogue, kPaired, decltype(columns)::value>(
          p, sh, ring, exchange, item, group, warp, lane);
    };
    // The fewest columns that hold the group; any choice gives the same bits.
    if constexpr (L::kSplit) {
      if (item.rows <= 8)
        with(std::integral_constant<int, 8>{});
      else
        with(std::integral_constant<int, 16>{});
    } else if constexpr (kMaxColumns <= 32) {
      if (item.rows <= 8)
        with(std::integral_constant<int, 8>{});
      else if (item.rows <= 16)
        with(std::integral_constant<int, 16>{});
      else
        with(std::integral_constant<int, 32>{});
    } else if constexpr (kMaxColumns <= 64) {
      if (item.rows <= 16)
        with(std::integral_constant<int, 16>{});
      else if (item.rows <= 32)
        with(std::integral_constant<int, 32>{});
      else if (item.rows <= 48)
        with(std::integral_constant<int, 48>{});
      else
        with(std::integral_constant<int, 64>{});
    } else {
      if constexpr (kEpilogue == EpilogueKind::kSwiglu) {
        if (item.rows > kRowsOrientation) {
          consume_rows<Operand>(p, sh, ring, item, group, warp, lane);
          continue;
        }
      }
      if (item.rows <= 16)
        with(std::integral_constant<int, 16>{});
      else if (item.rows <= 48)
        with(std::integral_constant<int, 48>{});
      else if (item.rows <= 64)
        with(std::integral_constant<int, 64>{});
      else if (item.rows <= 80)
        with(std::integral_constant<int, 80>{});
      else
        with(std::integral_constant<int, 96>{});
    }
  }
}

}  // namespace moesaic::cuda
