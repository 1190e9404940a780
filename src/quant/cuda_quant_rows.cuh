// Device code of cuda_quant_rows.h, for kernels that quantise beside other work.
#pragma once

#include <cstdint>

#include "quant/cuda_fp8.cuh"
#include "quant/cuda_quant_rows.h"

namespace moesaic::cuda {

// Groups first, first + step ... of all tokens' groups of 128; sixteen threads of eight values per
// group. `first` and first + 1 belong to the halves of one warp and step is even.
__device__ __forceinline__ void quantize_groups(const QuantRowsParams& p, std::int64_t first,
                                                std::int64_t step) {
  const std::int64_t groups = (p.columns + 127) / 128;
  const std::int64_t total = p.tokens * groups;
  const int part = static_cast<int>(threadIdx.x) & 15;
  // Both halves of a warp leave the loop together: an odd last group has an idle partner.
  for (std::int64_t i = first; (i & ~std::int64_t{1}) < total; i += step) {
    const std::int64_t m = i / groups, g = i - m * groups;
    const std::int64_t column = g * 128 + part * 8;
    const bool inside = i < total && column < p.columns;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside) v = *reinterpret_cast<const uint4*>(p.x + m * p.columns + column);
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
    float f[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      f[2 * j] = bf16_low(words[j]);
      f[2 * j + 1] = bf16_high(words[j]);
    }
    if (p.weights != nullptr && inside) {
      const float w = round_bf16(p.weights[m]);
#pragma unroll
      for (float& e : f) e = round_bf16(e * w);
    }
    if (!p.fp8) {
      if (inside) {
        *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.q) + m * p.columns + column) =
            make_uint4(ptx::bf16x2(f[0], f[1]), ptx::bf16x2(f[2], f[3]), ptx::bf16x2(f[4], f[5]),
                       ptx::bf16x2(f[6], f[7]));
      }
      continue;
    }
    float amax = 0.0F;
#pragma unroll
    for (const float e : f) amax = fmaxf(amax, fabsf(e));
#pragma unroll
    for (int d = 1; d < 16; d <<= 1) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, d));
    const float s = fp8_scale(amax, p.power_of_two_scales), r = 1.0F / s;
    if (inside) {
      std::uint32_t code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        code[j] = ptx::e4m3x2(divide(f[2 * j], s, r), divide(f[2 * j + 1], s, r));
      }
      *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.q) + m * p.columns + column) =
          make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
    }
    if (i < total && part == 0) p.scale[g * p.scale_stride + m] = s;
  }
}

}  // namespace moesaic::cuda
