// Largest magnitudes of the columns of an accumulator tile over the rows of a warp: weights as the M
// operand (gemm_products.cuh), where eight lanes have a column.
#pragma once

#include <cstdint>

#include "cuda/row_codes.cuh"

namespace moesaic::cuda {

// The largest magnitude in each column of what a thread has: where gated, elements 4 j + i are the
// channels'.
template <int kColumns>
struct ColumnMagnitudes {
  float of[kColumns / 4];  // 2 j + i: column 8 j + 2 (lane % 4) + i
};
template <bool kGated, int kColumns, bool kInt8 = false>
__device__ __forceinline__ ColumnMagnitudes<kColumns> column_magnitudes(
    const float (&acc)[2][kColumns / 2]) {
  ColumnMagnitudes<kColumns> m;
#pragma unroll
  for (int e = 0; e < kColumns / 4; ++e) {
    const int at = 4 * (e >> 1) + (e & 1);
    m.of[e] = larger(kInt8, fabsf(acc[0][at]), fabsf(acc[1][at]));
    if constexpr (!kGated) {
      m.of[e] = larger(kInt8, m.of[e], larger(kInt8, fabsf(acc[0][at + 2]), fabsf(acc[1][at + 2])));
    }
  }
  return m;
}

// Takes a maximum for each of kCount values over the eight lanes with the same lane % 4. Lanes share
// the work: while a number of values is even, each of a pair goes on with half of them.
template <int kCount, bool kInt8 = false>
struct ColumnMaxima {
  static constexpr int after(int count) { return count % 2 == 0 ? count / 2 : count; }
  static constexpr int kTwo = after(kCount), kFour = after(kTwo), kLeft = after(kFour);

  float v[kLeft];  // of values first ... of the kCount
  int first = 0;
  bool own = true;  // no other lane has the same

  // Without kInt8 NaN is dropped where there is a number.
  __device__ __forceinline__ ColumnMaxima(const float (&all)[kCount], int lane) {
    float two[kTwo], four[kFour];
    step<16>(all, two, lane);
    step<8>(two, four, lane);
    step<4>(four, v, lane);
  }
  // with(column, maximum) of value 2 j + i, column 8 j + 2 (lane % 4) + i.
  template <class With>
  __device__ __forceinline__ void each(int lane, const With& with) const {
#pragma unroll
    for (int k = 0; k < kLeft; ++k) {
      const int e = first + k;
      with((e >> 1) * 8 + 2 * (lane & 3) + (e & 1), v[k]);
    }
  }

 private:
  template <int kMask, int kFrom, int kTo>
  __device__ __forceinline__ void step(const float (&from)[kFrom], float (&to)[kTo], int lane) {
    const bool upper = (lane & kMask) != 0;
    if constexpr (kFrom == kTo) {
#pragma unroll
      for (int k = 0; k < kTo; ++k) {
        to[k] = larger(kInt8, from[k], __shfl_xor_sync(0xFFFFFFFFU, from[k], kMask));
      }
      own = own && !upper;
    } else {
#pragma unroll
      for (int k = 0; k < kTo; ++k) {
        const float kept = upper ? from[k + kTo] : from[k];
        const float given = upper ? from[k] : from[k + kTo];
        to[k] = larger(kInt8, kept, __shfl_xor_sync(0xFFFFFFFFU, given, kMask));
      }
      first += upper ? kTo : 0;
    }
  }
};

}  // namespace moesaic::cuda
