// The intermediate with one scale per row (Inner of format_parts.h: WholeRow). With static scales
// GEMM1's epilogue stores codes. Otherwise it stores bf16 and the largest magnitude of each row,
// and the CTA that finishes the last band of a group quantises the group's rows before GEMM2 may
// read them: inside the launch, by a CTA that runs, so nothing waits for a CTA that does not.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/store.cuh"
#include "cuda/row_codes.cuh"
#include "experts/sm90/column_maxima.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// From a channel on, rows of GEMM1's result from the item's first one on.
struct InnerRows {
  std::byte* const base;  // of elements of one byte; of kBytes each: kBytes times as far
  const std::int64_t first;
  const std::uint32_t intermediate;

  __device__ __forceinline__ InnerRows(const GroupedParams& p, std::byte* rows, int first_row,
                                       int channel)
      : base(rows),
        first(static_cast<std::int64_t>(first_row) * p.intermediate + channel),
        intermediate(static_cast<std::uint32_t>(p.intermediate)) {}
  template <int kBytes>
  __device__ __forceinline__ std::byte* at(int row) const {
    return base + first * kBytes +
           static_cast<std::uint64_t>(static_cast<std::uint32_t>(row)) * (intermediate * kBytes);
  }
};

// The magnitude m of a part of row `row`; as bits NaN is above all numbers.
__device__ __forceinline__ void add_row_amax(const GroupedParams& p, int row, float m) {
  atomicMax(p.whole.inner_amax + row, __float_as_uint(m));
}

// Codes of neighbouring channels under a static scale with reciprocal r.
__device__ __forceinline__ std::uint16_t static_codes(float r, float a, float b) {
  return static_cast<std::uint16_t>(ptx::e4m3x2(a * r, b * r));
}

// Weights as the M operand; acc as store_activated leaves it before rounding away (bf16 values).
template <class Inner, bool kGated, int kColumns>
__device__ __forceinline__ void store_whole_columns(const GroupedParams& p, int expert,
                                                    int first_row, int rows, int channel,
                                                    bool inside, int lane,
                                                    const float (&acc)[2][kColumns / 2]) {
  const int t = lane & 3;
  // store(live, column, channels a, b, and where not gated c, d) of every column.
  const auto each = [&](const auto& store) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * j + 2 * t + i, at = 4 * j + i;
        const bool live = column < rows && inside;
        if constexpr (kGated) {
          store(live, column, acc[0][at], acc[1][at], 0.0F, 0.0F);
        } else {
          store(live, column, acc[0][at], acc[0][at + 2], acc[1][at], acc[1][at + 2]);
        }
      }
    }
  };
  if (p.whole.inner_static != nullptr) {
    const InnerRows inner(p, p.rows.inner, first_row, channel);
    const float r = 1.0F / p.whole.inner_static[expert];
    each([&](bool live, int column, float a, float b, float c, float d) {
      std::byte* const to = inner.template at<1>(column);
      if constexpr (kGated) {
        ptx::store_if(live, to, static_codes(r, a, b));
      } else {
        ptx::store_if(live, to, ptx::e4m3x2(a * r, b * r) | ptx::e4m3x2(c * r, d * r) << 16);
      }
    });
    return;
  }
  const InnerRows inner(p, p.whole.inner_bf16, first_row, channel);
  each([&](bool live, int column, float a, float b, float c, float d) {
    std::byte* const to = inner.template at<2>(column);
    if constexpr (kGated) {
      ptx::store_if(live, to, ptx::bf16x2(a, b));
    } else {
      ptx::store_if(live, to, make_uint2(ptx::bf16x2(a, b), ptx::bf16x2(c, d)));
    }
  });
  ColumnMagnitudes<kColumns> magnitudes = column_magnitudes<kGated, kColumns, Inner::kInt8>(acc);
  MOESAIC_CUDA_FAULT(cuda_experts_row_amax_of_one_band,
                     for (float& m
                          : magnitudes.of) m = channel >= 128 ? 0.0F : m;)
  const ColumnMaxima<kColumns / 4, Inner::kInt8> maxima(magnitudes.of, lane);
  maxima.each(lane, [&](int column, float m) {
    if (maxima.own && column < rows) add_row_amax(p, first_row + column, m);
  });
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
  constexpr int kAtOnce = 8;
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
    *sh.flag(0) = ptx::add_acq_rel(done, 1) + 1 == needed ? 1 : 0;
  }
  ptx::named_barrier_sync(kRequantBarrier, kThreads);
  if (*sh.flag(0) == 0) return;
  quantise_group<Inner, Tile, kThreads>(p, reinterpret_cast<RowScale*>(sh.amax()), item, thread);
  if (thread == 0) ptx::add_release(done, kGroupQuantised);
}

}  // namespace moesaic::cuda
