// The consumer warpgroups of the grouped-GEMM kernel (cuda_grouped.cuh): multiply-accumulate in
// either orientation, then the epilogue of an item.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "experts/cuda_epilogue.cuh"
#include "experts/cuda_grouped_layout.cuh"
#include "permute/cuda_combine.cuh"

namespace moesaic::cuda {

// The stages of an item as a consumer warp passes through them.
template <class Operand, int kMaxColumns, bool kPaired>
struct StageReader {
  using L = Layout<Operand, kMaxColumns>;
  using Ring = RingPosition<L::kStages>;
  const Shared<Operand, kMaxColumns, kPaired>& sh;
  Ring& ring;
  const int lane;
  bool ready = false;  // the stage at `ring` is known to be full

  // The stage at `ring` is in shared memory and may be read by wgmma.
  __device__ __forceinline__ void wait() const {
    if (!ready) ptx::mbarrier_wait(sh.full(ring.slot), ring.parity);
    ptx::fence_proxy_async();  // for the gathered token rows
  }
  // Looks at the next stage, where the time for that is hidden by products in flight.
  __device__ __forceinline__ void peek() {
    Ring next = ring;
    next.advance();
    ready = ptx::mbarrier_test(sh.full(next.slot), next.parity);
  }
  // This warp has read the stage of `slot`.
  __device__ __forceinline__ void release(std::uint32_t slot) const {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(sh.empty(slot));
      if (kPaired) ptx::mbarrier_arrive_remote(sh.empty(slot), ptx::cluster_cta_rank() ^ 1);
    }
  }
  // Distance of the stage's tiles from those of stage 0, in units of descriptors.
  __device__ __forceinline__ std::uint32_t offset() const {
    return __shfl_sync(0xFFFFFFFFU, ring.slot, 0) * static_cast<std::uint32_t>(L::kStageBytes >> 4);
  }
};

// The four K steps of a stage: d = or += a b^T.
template <class Mma, int kRegisters>
__device__ __forceinline__ void multiply_stage(float (&d)[kRegisters], std::uint32_t a,
                                               std::uint32_t b, bool accumulate) {
#pragma unroll
  for (std::uint32_t k = 0; k < 4; ++k) {
    Mma::run(d, ptx::wgmma_descriptor(a + k * ptx::kWgmmaStep),
             ptx::wgmma_descriptor(b + k * ptx::kWgmmaStep), accumulate || k > 0 ? 1 : 0);
  }
}

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
  const std::uint32_t weights =
      ptx::wgmma_tile(sh.weights(0) + static_cast<std::uint32_t>(group) * kSlabBytes);
  const std::uint32_t tokens = ptx::wgmma_tile(sh.tokens(0));
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[m][i] = 0.0F;
  }
  if constexpr (!L::kScaled) {
    // A stage's products stay in flight while the next one's are issued.
    std::uint32_t previous = 0;
    for (int c = 0; c < chunks; ++c) {
      stage.wait();
      const std::uint32_t offset = stage.offset();
      const std::uint32_t a = weights + offset, b = tokens + offset;
      ptx::wgmma_fence();
      multiply_stage<Mma>(acc[0], a, b, true);
      multiply_stage<Mma>(acc[1], a + kBlockStep, b, true);
      ptx::wgmma_commit();
      stage.peek();
      ptx::wgmma_wait<1>();
      if (c > 0) stage.release(previous);
      previous = ring.slot;
      ring.advance();
    }
    ptx::wgmma_wait<0>();
    stage.release(previous);
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

// The same products with the tokens as the M operand: the warpgroup has 64 token rows and all 256
// weight rows. Element 64 h + 4j + i of acc is token row g, weight row 128 h + 8j + 2t + i of the
// band; 64 h + 4j + 2 + i is token row g + 8. Scales cost two registers per token row instead of
// two loads and four products per column, which is what makes this orientation faster for full
// groups. `row` is the thread's first token row in the tile.
template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void multiply_rows(
    const Shared<Operand, kMaxColumns, kPaired>& sh,
    RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring, int chunks, int group, int row,
    int lane, bool scale_by_row_half, float (&acc)[128]) {
  using L = Layout<Operand, kMaxColumns>;
  StageReader<Operand, kMaxColumns, kPaired> stage{sh, ring, lane};
  const std::uint32_t tokens =
      ptx::wgmma_tile(sh.tokens(0) + static_cast<std::uint32_t>(group) * 8192);
  const std::uint32_t weights = ptx::wgmma_tile(sh.weights(0));
  // A shuffle's result is kept in a register; this would be computed again in every stage.
  const std::uint32_t row_scale =
      __shfl_sync(0xFFFFFFFFU, 16 + 4 * static_cast<std::uint32_t>(row), lane);
#pragma unroll
  for (int i = 0; i < 128; ++i) acc[i] = 0.0F;
  if constexpr (!L::kScaled) {
    std::uint32_t previous = 0;
    for (int c = 0; c < chunks; ++c) {
      stage.wait();
      const std::uint32_t offset = stage.offset();
      ptx::wgmma_fence();
      multiply_stage<ptx::Wgmma<Operand, 256>>(acc, tokens + offset, weights + offset, true);
      ptx::wgmma_commit();
      stage.peek();
      ptx::wgmma_wait<1>();
      if (c > 0) stage.release(previous);
      previous = ring.slot;
      ring.advance();
    }
    ptx::wgmma_wait<0>();
    stage.release(previous);
  } else {
    for (int c = 0; c < chunks; ++c) {
      stage.wait();
      const std::uint32_t offset = stage.offset();
      const std::uint32_t a = tokens + offset, b = weights + offset;
      const std::uint32_t scales = sh.scales(ring.slot);
      const float lo = ptx::load_shared_f32(scales + row_scale);
      const float hi = ptx::load_shared_f32(scales + row_scale + 32);
      const float first = ptx::load_shared_f32(scales);
      const float other = ptx::load_shared_f32(scales + 4);
      float part[64];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ptx::wgmma_fence();
        multiply_stage<ptx::Wgmma<Operand, 128>>(
            part, a, b + static_cast<std::uint32_t>(h * (kSlabBytes >> 4)), false);
        ptx::wgmma_commit();
        if (h == 1) stage.peek();
        // Gate and up chunks alternate, or the slab decides.
        const float w0 = scale_by_row_half || h == 0 ? first : other;
        const float w1 = scale_by_row_half ? other : w0;
        const float lo0 = lo * w0, hi0 = hi * w0, lo1 = lo * w1, hi1 = hi * w1;
        ptx::wgmma_wait<0>();
        if (h == 1) stage.release(ring.slot);
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

template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void consume_rows(
    const GroupedParams& p, const Shared<Operand, kMaxColumns, kPaired>& sh,
    RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring, const Item& item, int group,
    int warp, int lane) {
  const bool second = item.band >= p.bands1;
  const int row = group * 64 + (warp & 3) * 16 + (lane >> 2);
  float acc[128];
  if (second) {
    std::int32_t pair[2];
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = item.first_row + row + 8 * i;
      const bool valid = row + 8 * i < item.rows;
      pair[i] = valid ? p.pair_of_row[at] : -1;
      factor[i] = valid && p.weight_of_row != nullptr ? p.weight_of_row[at] : 1.0F;
    }
    multiply_rows<Operand>(sh, ring, p.chunks2, group, row, lane, false, acc);
    store_weighted_rows(p, item.expert, item.band - p.bands1, lane, pair, factor, acc);
  } else {
    multiply_rows<Operand>(sh, ring, p.chunks1, group, row, lane, true, acc);
    store_activated_rows<Operand>(p, item.expert, item.band, item.first_row + row, item.rows - row,
                                  lane, acc);
    __syncwarp();
    if (lane == 0) ptx::add_release(p.group_done + item.group, 1);
  }
}

// The 256 consumer threads, after the stores of a GEMM2 item: the last item of a band sums the
// band's columns of every token.
template <class Operand, int kMaxColumns, bool kPaired>
__device__ __forceinline__ void combine_band(const GroupedParams& p,
                                             const Shared<Operand, kMaxColumns, kPaired>& sh,
                                             int band) {
  const int thread = static_cast<int>(threadIdx.x);
  ptx::named_barrier_sync(kRequantBarrier, 256);
  if (thread == 0) {
    *sh.flag() = ptx::add_acq_rel(p.band_done + band, 1) + 1 == *p.num_groups ? 1 : 0;
  }
  ptx::named_barrier_sync(kRequantBarrier, 256);
  if (*sh.flag() == 0) return;
  const std::int64_t column = static_cast<std::int64_t>(band) * kBandRows + thread % 32 * 8;
  if (column >= p.hidden) return;
  for (std::int64_t t = thread / 32; t < p.combine.tokens; t += 8)
    combine_columns(p.combine, t, column);
}

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired, int kColumns>
__device__ __forceinline__ void consume_item(
    const GroupedParams& p, const Shared<Operand, kMaxColumns, kPaired>& sh,
    RingPosition<Layout<Operand, kMaxColumns>::kStages>& ring, const Item& item, int group,
    int warp, int lane) {
  const bool second = item.band >= p.bands1;
  constexpr int kLists = (kColumns + 31) / 32;
  float acc[2][kColumns / 2];
  if (second) {
    // Destination and factor of column `lane + 32 i`, asked for early.
    std::int32_t pair[kLists];
    float factor[kLists];
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
      const int column = lane + 32 * i;
      const bool valid = column < item.rows;
      pair[i] = valid ? p.pair_of_row[item.first_row + column] : -1;
      factor[i] =
          valid && p.weight_of_row != nullptr ? p.weight_of_row[item.first_row + column] : 1.0F;
    }
    multiply<Operand, kMaxColumns, kPaired, kColumns>(sh, ring, p.chunks2, group, lane, false, acc);
    store_weighted<kColumns>(p, item.expert, item.band - p.bands1, group, warp & 3, lane, pair,
                             factor, acc);
    if (!kPaired && kMaxColumns <= 64 && p.fold_combine) combine_band(p, sh, item.band - p.bands1);
  } else {
    multiply<Operand, kMaxColumns, kPaired, kColumns>(sh, ring, p.chunks1, group, lane,
                                                      kEpilogue != EpilogueKind::kPlain, acc);
    store_activated<Operand, kEpilogue, kColumns>(p, item.expert, item.band, item.first_row,
                                                  item.rows, group, warp, lane, sh.amax(), acc);
    __syncwarp();
    if (lane == 0) ptx::add_release(p.group_done + item.group, 1);
  }
}

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired>
__device__ __forceinline__ void consume(const GroupedParams& p,
                                        const Shared<Operand, kMaxColumns, kPaired>& sh, int warp,
                                        int lane) {
  RingPosition<Layout<Operand, kMaxColumns>::kStages> ring;
  RingPosition<kItemSlots> slot;
  // Lane 0's: so the compiler sees that the warp agrees.
  const int group = __shfl_sync(0xFFFFFFFFU, warp >> 2, 0);
  if (!kPaired && kMaxColumns <= 64 && p.fold_combine && *p.num_groups == 0) {
    // Nobody has work, but every output must be written.
    const std::int64_t vectors = p.hidden / 8;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
         i < p.combine.tokens * vectors; i += static_cast<std::int64_t>(gridDim.x) * 256) {
      combine_columns(p.combine, i / vectors, i % vectors * 8);
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
          p, sh, ring, item, group, warp, lane);
    };
    // The fewest columns that hold the group; any choice gives the same bits.
    if constexpr (kMaxColumns <= 32) {
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
