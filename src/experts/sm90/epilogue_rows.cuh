// Epilogues of items whose tokens are the M operand: a thread has whole runs of channels of two rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/fault.cuh"
#include "cuda/fp8.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/epilogue.cuh"

namespace moesaic::cuda {

// GEMM2 with tokens as rows: y2[pair][256 band + 128 h + 32 w + 8 t + {0..7}], 16 bytes per store.
template <bool kWide>
__device__ __forceinline__ void store_weighted_rows(const GroupedParams& p, int expert, int band,
                                                    int lane, const std::int32_t (&pair)[2],
                                                    const float (&factor)[2],
                                                    const float (&acc)[128]) {
  const int t = lane & 3;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int channel = band * kBandRows + h * 128 + w * 32 + t * 8;
      if (channel >= p.hidden) continue;
      float bias[8] = {};
      if (p.weights.w2_bias != nullptr) {
        const float* from =
            p.weights.w2_bias + static_cast<std::int64_t>(expert) * p.hidden + channel;
#pragma unroll
        for (int e = 0; e < 8; ++e) bias[e] = from[e];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pair[i] < 0) continue;
        // Two channels each: as bf16, or as they are.
        std::conditional_t<kWide, float2, std::uint32_t> v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // Channel 4a + 2b + c of the eight is element a of chunk 8b + 2w + c.
          const int a = e >> 1, b = e & 1;
          const int at = 64 * h + 4 * (8 * b + 2 * w) + 2 * i + a;
          const float lo = (acc[at] + bias[2 * e]) * factor[i];
          const float hi = (acc[at + 4] + bias[2 * e + 1]) * factor[i];
          if constexpr (kWide) {
            v[e] = make_float2(lo, hi);
          } else {
            v[e] = ptx::bf16x2(lo, hi);
          }
        }
        const std::int64_t to = static_cast<std::int64_t>(pair[i]) * p.hidden + channel;
        if constexpr (kWide) {
          auto* const row = reinterpret_cast<float4*>(static_cast<float*>(p.rows.y2) + to);
          store_row<true>(row, make_float4(v[0].x, v[0].y, v[1].x, v[1].y));
          store_row<true>(row + 1, make_float4(v[2].x, v[2].y, v[3].x, v[3].y));
        } else {
          store_row<true>(reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.rows.y2) + to),
                          make_uint4(v[0], v[1], v[2], v[3]));
        }
      }
    }
  }
}

// GEMM1 with tokens as rows, SwiGLU family. The thread has rows `row` and row + 8 (of which `rows`
// count from `row` on) and of each row 32 channels: 128 band + 64 h + 16 w + 4 t + {0..3}; a quad
// has the whole group of 128, so the largest magnitude takes two shuffles and no barrier.
template <class Inner>
__device__ __forceinline__ void store_activated_rows(const GroupedParams& p, int expert, int band,
                                                     int row, int rows, int lane,
                                                     float (&acc)[128]) {
  const int t = lane & 3;
  const int channel0 = band * 128 + t * 4;
  float amax[2] = {0.0F, 0.0F};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int channel = channel0 + h * 64 + w * 16;
      const bool inside = channel < p.intermediate;
      float gate_bias[4] = {}, up_bias[4] = {};
      if (p.weights.w13_bias != nullptr && inside) {
        const float* from =
            p.weights.w13_bias + static_cast<std::int64_t>(expert) * 2 * p.intermediate + channel;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          gate_bias[e] = from[e];
          up_bias[e] = from[p.intermediate + e];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Channel 2a + b of the four: element a of gate chunk 8b + 2w; the up chunk is the next.
        const int a = e >> 1, b = e & 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 64 * h + 4 * (8 * b + 2 * w) + 2 * i + a;
          const float y = SwigluEpilogue::activate(p.activation, acc[at] + gate_bias[e],
                                                   acc[at + 4] + up_bias[e]);
          acc[at] = inside ? round_inner<Inner>(y) : 0.0F;
          amax[i] = fmaxf(amax[i], fabsf(acc[at]));
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float s = 1.0F, r = 1.0F;
    if constexpr (Inner::kQuantises) {
      float m = fmaxf(amax[i], __shfl_xor_sync(0xFFFFFFFFU, amax[i], 1));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFU, m, 2));
      MOESAIC_CUDA_FAULT(cuda_experts_full_groups_have_the_amax_of_a_lane, m = amax[i];)
      s = fp8_scale(m, p.power_of_two_scales);
      r = 1.0F / s;
      if (t == 0 && 8 * i < rows)
        p.rows.inner_scale[band * p.rows.inner_scale_stride + row + 8 * i] = s;
    }
    if constexpr (Inner::kWholeRow) {
      float m = fmaxf(amax[i], __shfl_xor_sync(0xFFFFFFFFU, amax[i], 1));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFU, m, 2));
      MOESAIC_CUDA_FAULT(cuda_experts_full_groups_have_the_amax_of_a_lane, m = amax[i];)
      if (t == 0 && 8 * i < rows) add_row_amax(p, row + 8 * i, m);
    }
    if (8 * i >= rows) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int channel = channel0 + h * 64 + w * 16;
        if (channel >= p.intermediate) continue;
        const int at = 64 * h + 8 * w + 2 * i;  // channels 0 and 2; 1 and 3 are 32 further
        const std::int64_t to = static_cast<std::int64_t>(row + 8 * i) * p.intermediate + channel;
        if constexpr (Inner::kWholeRow) {
          const float v[4] = {acc[at], acc[at + 32], acc[at + 1], acc[at + 33]};
          store_channels<Inner>(p, expert, row + 8 * i, channel, v);
        } else if constexpr (Inner::kQuantises) {
          *reinterpret_cast<std::uint32_t*>(p.rows.inner + to) =
              ptx::e4m3x2(divide(acc[at], s, r), divide(acc[at + 32], s, r)) |
              ptx::e4m3x2(divide(acc[at + 1], s, r), divide(acc[at + 33], s, r)) << 16;
        } else {
          *reinterpret_cast<uint2*>(p.rows.inner + 2 * to) =
              make_uint2(inner_pair<Inner>(acc[at], acc[at + 32]),
                         inner_pair<Inner>(acc[at + 1], acc[at + 33]));
        }
      }
    }
  }
}

}  // namespace moesaic::cuda
