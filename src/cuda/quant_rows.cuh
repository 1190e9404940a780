// Device code of quant_rows.h, for kernels that quantise beside other work.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/fp8.cuh"
#include "cuda/quant_rows.h"

namespace moesaic::cuda {

// Quantises group `g` of row `m`: sixteen threads have a group of 128, each eight values `v`.
// `inside`: the thread has values; `live`: the half warp has a group.
__device__ __forceinline__ void quantize_group(const QuantRowsParams& p, std::int64_t m,
                                               std::uint32_t g, bool live, bool inside,
                                               const uint4& v) {
  const std::uint32_t part = threadIdx.x & 15;
  const std::uint32_t column = g * 128 + part * 8;
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
  float f[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    f[2 * j] = bf16_low(words[j]);
    f[2 * j + 1] = bf16_high(words[j]);
  }
  if (p.weights != nullptr && inside) {
    float w = round_bf16(p.weights[m]);
    MOESAIC_CUDA_FAULT(cuda_quant_rows_ignores_the_router_weight, w = 1.0F;)
#pragma unroll
    for (float& e : f) e = round_bf16(e * w);
  }
  if (p.form == RowForm::kBf16) {
    if (inside) {
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.q) + m * p.columns + column) =
          make_uint4(ptx::bf16x2(f[0], f[1]), ptx::bf16x2(f[2], f[3]), ptx::bf16x2(f[4], f[5]),
                     ptx::bf16x2(f[6], f[7]));
    }
    return;
  }
  float amax = 0.0F;
#pragma unroll
  for (const float e : f) amax = fmaxf(amax, fabsf(e));
#pragma unroll
  for (int d = 1; d < 16; d <<= 1) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, d));
  MOESAIC_CUDA_FAULT(cuda_quant_rows_have_the_amax_of_a_value, amax = fabsf(f[0]);)
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
  if (live && part == 0) p.scale[g * p.scale_stride + m] = s;
}

// Groups of 128 of all tokens.
__device__ __forceinline__ std::uint32_t count_groups(const QuantRowsParams& p) {
  return static_cast<std::uint32_t>(p.tokens) * static_cast<std::uint32_t>((p.columns + 127) / 128);
}

// Groups first, first + step ... below `end` of all tokens'; sixteen threads of eight values per
// group. `first` and first + 1 belong to the halves of one warp and step is even. kAtOnce groups
// are requested together. There are fewer than 2^31 groups.
template <int kAtOnce = 1>
__device__ __forceinline__ void quantize_groups(const QuantRowsParams& p, std::uint32_t first,
                                                std::uint32_t step, std::uint32_t end) {
  const auto groups = static_cast<std::uint32_t>((p.columns + 127) / 128);
  const std::uint32_t step_rows = step / groups, step_groups = step - step_rows * groups;
  const std::uint32_t part = threadIdx.x & 15;
  std::uint32_t m = first / groups, g = first - m * groups;
  // Both halves of a warp leave the loop together: an odd last group has an idle partner.
  for (std::uint32_t i = first; (i & ~1U) < end;) {
    uint4 v[kAtOnce];
    std::uint32_t row[kAtOnce], group[kAtOnce];
    bool live[kAtOnce], inside[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const std::uint32_t column = g * 128 + part * 8;
      row[u] = m;
      group[u] = g;
      live[u] = i < end;
      inside[u] = live[u] && column < p.columns;
      v[u] = make_uint4(0, 0, 0, 0);
      if (inside[u]) {
        v[u] = *reinterpret_cast<const uint4*>(p.x + static_cast<std::int64_t>(m) * p.columns +
                                               column);
      }
      i += step;
      m += step_rows;
      g += step_groups;
      if (g >= groups) {
        g -= groups;
        ++m;
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (__any_sync(0xFFFFFFFFU, live[u]) == 0) break;
      quantize_group(p, row[u], group[u], live[u], inside[u], v[u]);
    }
  }
}

}  // namespace moesaic::cuda
