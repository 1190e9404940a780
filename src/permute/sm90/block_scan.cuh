// Sums over the threads of a block, for the kernels that make work lists.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

// Inclusive sums of both over the block's threads. They are 1024; `sums`: two
// lines of a word per warp.
__device__ __forceinline__ void block_scan(std::int32_t& a, std::int32_t& b,
                                           std::int32_t (&sums)[2][32]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const auto scan = [&](std::int32_t& v, std::int32_t& w) {
#pragma unroll
    for (unsigned d = 1; d < 32; d <<= 1) {
      const std::int32_t v_up = __shfl_up_sync(0xFFFFFFFFU, v, d);
      const std::int32_t w_up = __shfl_up_sync(0xFFFFFFFFU, w, d);
      if (lane >= static_cast<int>(d)) {
        v += v_up;
        w += w_up;
      }
    }
  };
  scan(a, b);
  if (lane == 31) {
    sums[0][warp] = a;
    sums[1][warp] = b;
  }
  __syncthreads();
  if (warp == 0) {
    std::int32_t v = sums[0][lane], w = sums[1][lane];
    scan(v, w);
    sums[0][lane] = v;
    sums[1][lane] = w;
  }
  __syncthreads();
  if (warp > 0) {
    a += sums[0][warp - 1];
    b += sums[1][warp - 1];
  }
}

}  // namespace moesaic::cuda
