// The intermediate with one scale per row (Inner of format_parts.h: WholeRow). With static scales
// GEMM1's epilogue stores codes. Otherwise it stores bf16 and the largest magnitude of each row,
// and the CTA that finishes the last band of a group quantises the group's rows before GEMM2 may
// read them: inside the launch, by a CTA that runs, so nothing waits for a CTA that does not.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/row_codes.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// Two or four neighbouring channels of row `row`, rounded to bf16.
template <class Inner, int kChannels>
__device__ __forceinline__ void store_channels(const GroupedParams& p, int expert, int row,
                                               int channel, const float (&v)[kChannels]) {
  const std::int64_t at = static_cast<std::int64_t>(row) * p.intermediate + channel;
  if (p.whole.inner_static != nullptr) {
    const float r = 1.0F / p.whole.inner_static[expert];
    std::uint32_t codes = ptx::e4m3x2(v[0] * r, v[1] * r);
    if constexpr (kChannels == 4) {
      codes |= ptx::e4m3x2(v[2] * r, v[3] * r) << 16;
      *reinterpret_cast<std::uint32_t*>(p.rows.inner + at) = codes;
    } else {
      *reinterpret_cast<std::uint16_t*>(p.rows.inner + at) = static_cast<std::uint16_t>(codes);
    }
  } else if constexpr (kChannels == 4) {
    *reinterpret_cast<uint2*>(p.whole.inner_bf16 + 2 * at) =
        make_uint2(ptx::bf16x2(v[0], v[1]), ptx::bf16x2(v[2], v[3]));
  } else {
    *reinterpret_cast<std::uint32_t*>(p.whole.inner_bf16 + 2 * at) = ptx::bf16x2(v[0], v[1]);
  }
}

// The magnitude m of a part of row `row`.
__device__ __forceinline__ void add_row_amax(const GroupedParams& p, int row, float m) {
  if (p.whole.inner_static == nullptr) {
    atomicMax(p.whole.inner_amax + row, __float_as_uint(m));
  }
}

// Weights as the M operand; acc as store_activated leaves it before rounding away (bf16 values).
template <class Inner, bool kGated, int kColumns>
__device__ __forceinline__ void store_whole_columns(const GroupedParams& p, int expert,
                                                    int first_row, int rows, int channel,
                                                    bool inside, int lane,
                                                    const float (&acc)[2][kColumns / 2]) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * j + 2 * t + i;
      const bool live = column < rows;
      float m = fmaxf(fabsf(acc[0][4 * j + i]), fabsf(acc[1][4 * j + i]));
      if constexpr (kGated) {
        const float v[2] = {acc[0][4 * j + i], acc[1][4 * j + i]};
        if (live && inside) store_channels<Inner>(p, expert, first_row + column, channel, v);
      } else {
        const float v[4] = {acc[0][4 * j + i], acc[0][4 * j + 2 + i], acc[1][4 * j + i],
                            acc[1][4 * j + 2 + i]};
        m = fmaxf(m, fmaxf(fabsf(v[1]), fabsf(v[3])));
        if (live && inside) store_channels<Inner>(p, expert, first_row + column, channel, v);
      }
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFU, m, 4));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFU, m, 8));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFU, m, 16));
      MOESAIC_CUDA_FAULT(cuda_experts_row_amax_of_one_band, if (channel >= 128) m = 0.0F;)
      if (g == 0 && live) add_row_amax(p, first_row + column, m);
    }
  }
}

// Quantises the rows of a group; all consumer threads, with the results of all bands visible.
template <class Inner, class Tile, int kThreads>
__device__ __forceinline__ void quantise_group(const GroupedParams& p, RowScale* scales,
                                               const Item& item, int thread) {
  for (int r = thread; r < item.rows; r += kThreads) {
    const float amax = __uint_as_float(__ldcg(p.whole.inner_amax + item.first_row + r));
    scales[r] = own_row_scale(Inner::kInt8, amax);
    p.rows.inner_scale[item.first_row + r] = scales[r].s;
    MOESAIC_CUDA_FAULT(cuda_experts_requantised_with_another_scale,
                       p.rows.inner_scale[item.first_row + r] = 1.0F;)
  }
  ptx::named_barrier_sync(kRequantBarrier, kThreads);
  constexpr int kAtOnce = 4;
  const int pieces = p.intermediate / 8, all = item.rows * pieces;
  const int step_rows = kThreads / pieces, step_pieces = kThreads - step_rows * pieces;
  int row = thread / pieces, piece = thread - row * pieces;
  for (int i = thread; i < all;) {
    uint4 v[kAtOnce];
    int rows[kAtOnce], at[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      rows[u] = row;
      at[u] = piece * 8;
      v[u] = make_uint4(0, 0, 0, 0);
      if (row < item.rows) {
        v[u] = __ldcg(reinterpret_cast<const uint4*>(
            p.whole.inner_bf16 +
            2 * (static_cast<std::int64_t>(item.first_row + row) * p.intermediate + at[u])));
      }
      i += kThreads;
      row += step_rows;
      piece += step_pieces;
      if (piece >= pieces) {
        piece -= pieces;
        ++row;
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (rows[u] >= item.rows) break;
      float f[8];
      bf16x8(v[u], f);
      *reinterpret_cast<uint2*>(
          p.rows.inner + static_cast<std::int64_t>(item.first_row + rows[u]) * p.intermediate +
          at[u]) = row_codes(Inner::kInt8, false, scales[rows[u]], f);
    }
  }
  ptx::named_barrier_sync(kRequantBarrier, kThreads);
}

// All consumer threads, after the stores of a GEMM1 item: counts it and, with the group's last one,
// quantises.
template <class Inner, class Tile, class Shared>
__device__ __forceinline__ void hand_over_whole_rows(const GroupedParams& p, const Shared& sh,
                                                     const Item& item, int lane) {
  using L = typename Shared::L;
  constexpr int kThreads = L::kEpilogueThreads;
  std::uint32_t* const done = p.list.group_done + item.group;
  if (p.whole.inner_static != nullptr) {
    __syncwarp();
    if (lane == 0) ptx::add_release(done, 1);
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  ptx::named_barrier_sync(kRequantBarrier, kThreads);
  if (thread == 0) {
    auto needed = static_cast<std::uint32_t>(L::kSplit ? p.slabs1 : p.bands1);
    MOESAIC_CUDA_FAULT(cuda_experts_requantised_before_the_last_band, needed = 1;)
    *sh.flag() = ptx::add_acq_rel(done, 1) + 1 == needed ? 1 : 0;
  }
  ptx::named_barrier_sync(kRequantBarrier, kThreads);
  if (*sh.flag() == 0) return;
  quantise_group<Inner, Tile, kThreads>(p, reinterpret_cast<RowScale*>(sh.amax()), item, thread);
  if (thread == 0) ptx::add_release(done, kGroupQuantised);
}

}  // namespace moesaic::cuda
