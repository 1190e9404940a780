// The intermediate quantised in small groups and written down as the values of its codes (Inner of
// format_parts.h: GroupValues): GEMM1's epilogue stores bf16, and the warps that have stored all
// channels of some groups replace them. Loops over rows that are not unrolled: in registers the same
// would be most of the kernel's code.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/group_values.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/row_codes.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// First of the named barriers of two warps that share groups of 32 channels: one for each half of
// a warpgroup.
inline constexpr int kPairBarrier = 2;

// Quantises kChannels channels from `channel` on of rows `row`, row + step ... below `rows` of an
// item, which have been stored; eight channels of a row are one lane's.
template <RowForm kForm, int kChannels>
__device__ __forceinline__ void replace_by_values(const GroupedParams& p, int expert, int first_row,
                                                  int row, int step, int rows, int channel,
                                                  int lane) {
  constexpr int kLanes = kChannels / 8, kGroup = row_group_columns(kForm), kAtOnce = 4;
  float gscale = 1.0F;
  if constexpr (kForm == RowForm::kNv4Values) gscale = 1.0F / p.whole.inner_static[expert];
  const int column = channel + lane % kLanes * 8;
  row += lane / kLanes;
  // Rows of lane 0: the warp leaves the loop together.
  for (int first = row - lane / kLanes; first < rows; first += kAtOnce * step) {
    uint4 v[kAtOnce];
    uint4* at[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      at[u] = reinterpret_cast<uint4*>(
          p.rows.inner +
          2 * (static_cast<std::int64_t>(first_row + row + u * step) * p.intermediate + column));
      v[u] = make_uint4(0, 0, 0, 0);
      if (row + u * step < rows && column < p.intermediate) v[u] = __ldcg(at[u]);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      float f[8];
      bf16x8(v[u], f);
      float amax = 0.0F;
#pragma unroll
      for (const float e : f) amax = fmaxf(amax, fabsf(e));
#pragma unroll
      for (int d = 1; d < kGroup / 8; d <<= 1) {
        amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, d));
      }
      MOESAIC_CUDA_FAULT(cuda_values_have_the_amax_of_a_lane, amax = fabsf(f[0]);)
      const GroupScale scale = group_scale(kForm, amax, gscale);
#pragma unroll
      for (float& e : f) e = group_value(kForm, scale, e);
      if (row + u * step < rows && column < p.intermediate) {
        *at[u] = make_uint4(ptx::bf16x2(f[0], f[1]), ptx::bf16x2(f[2], f[3]),
                            ptx::bf16x2(f[4], f[5]), ptx::bf16x2(f[6], f[7]));
      }
    }
    row += kAtOnce * step;
  }
}

// After the stores of an item of GEMM1, by all consumer warps. Its channels begin at `channel`: of
// the band, and of the warps as epilogue.cuh has them. Not for split builds of groups that span
// more than a warpgroup.
template <RowForm kForm, bool kGated>
__device__ __forceinline__ void quantise_stored(const GroupedParams& p, int expert, int first_row,
                                                int rows, int channel, int group, int quarter,
                                                int lane) {
  constexpr int kGroup = row_group_columns(kForm);
  if constexpr (kGroup == 128) {
    ptx::named_barrier_sync(kRequantBarrier, 256);
    // Two rows of a group per warp; a plain band has two groups.
    const int warp = group * 4 + quarter;
    if constexpr (kGated) {
      replace_by_values<kForm, 128>(p, expert, first_row, 2 * warp, 16, rows, channel, lane);
    } else {
      replace_by_values<kForm, 128>(p, expert, first_row, 2 * quarter, 8, rows,
                                    channel + 128 * group, lane);
    }
  } else if constexpr (!kGated) {
    __syncwarp();
    replace_by_values<kForm, 32>(p, expert, first_row, 0, 8, rows,
                                 channel + group * 128 + quarter * 32, lane);
  } else if constexpr (kGroup == 16) {
    __syncwarp();
    replace_by_values<kForm, 16>(p, expert, first_row, 0, 16, rows,
                                 channel + group * 64 + quarter * 16, lane);
  } else {
    // Half of the rows each.
    ptx::named_barrier_sync(kPairBarrier + group * 2 + quarter / 2, 64);
    replace_by_values<kForm, 32>(p, expert, first_row, 8 * (quarter & 1), 16, rows,
                                 channel + group * 64 + quarter / 2 * 32, lane);
  }
}

}  // namespace moesaic::cuda
