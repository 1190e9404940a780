// Items of the grouped-GEMM kernel (grouped_gemm.cuh) with the tokens as the M operand: a
// warpgroup has 64 token rows and all 256 weight rows of the band. Scales cost two registers per
// token row instead of two loads and four products per column, which is what makes this
// orientation faster for full groups.
#pragma once

#include <cstdint>

#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "experts/sm90/epilogue.cuh"
#include "experts/sm90/gemm_stages.cuh"

namespace moesaic::cuda {

// Element 64 h + 4j + i of acc is token row g, weight row 128 h + 8j + 2t + i of the band; element
// 64 h + 4j + 2 + i is token row g + 8, with g = lane / 4, t = lane % 4. `row` is the thread's
// first token row in the tile.
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
    accumulate_stages(stage, chunks, [&](std::uint32_t offset) {
      ptx::wgmma_fence();
      multiply_stage<ptx::Wgmma<Operand, 256>>(acc, tokens + offset, weights + offset, true);
    });
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

}  // namespace moesaic::cuda
