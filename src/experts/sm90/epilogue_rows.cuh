// Epilogues of items whose tokens are the M operand: a thread has whole runs of channels of two rows.
#pragma once

#include <cstdint>

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
  constexpr std::uint32_t kBytes = kWide ? 4 : 2;
  const int channel0 = band * kBandRows + t * 8;
  std::byte* const y2 = static_cast<std::byte*>(p.rows.y2) + channel0 * std::int64_t{kBytes};
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(p.hidden) * kBytes;
  std::byte* row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    row[i] = y2 + static_cast<std::uint64_t>(static_cast<std::uint32_t>(pair[i])) * row_bytes;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int channel = channel0 + h * 128 + w * 32;
      const bool inside = channel < p.hidden;
      float bias[8] = {};
      if (p.weights.w2_bias != nullptr && inside) {
        const float* from =
            p.weights.w2_bias + static_cast<std::int64_t>(expert) * p.hidden + channel;
#pragma unroll
        for (int e = 0; e < 8; ++e) bias[e] = from[e];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          // Channel 4a + 2b + c of the eight is element a of chunk 8b + 2w + c.
          const int from = 64 * h + 4 * (8 * (e >> 1 & 1) + 2 * w + (e & 1)) + 2 * i + (e >> 2);
          v[e] = (acc[from] + bias[e]) * factor[i];
        }
        const bool live = pair[i] >= 0 && inside;
        std::byte* const to = row[i] + (h * 128 + w * 32) * kBytes;
        if constexpr (kWide) {
          store_channels_if<kWide, true>(live, to, make_float4(v[0], v[1], v[2], v[3]));
          store_channels_if<kWide, true>(live, to + 16, make_float4(v[4], v[5], v[6], v[7]));
        } else {
          ptx::store_if<true>(live, to,
                              make_uint4(ptx::bf16x2(v[0], v[1]), ptx::bf16x2(v[2], v[3]),
                                         ptx::bf16x2(v[4], v[5]), ptx::bf16x2(v[6], v[7])));
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
  constexpr bool kInt8 = [] {
    if constexpr (Inner::kWholeRow) return Inner::kInt8;
    return false;
  }();
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
          amax[i] = larger(kInt8, amax[i], fabsf(acc[at]));
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
      if (p.whole.inner_static == nullptr) {
        float m = larger(Inner::kInt8, amax[i], __shfl_xor_sync(0xFFFFFFFFU, amax[i], 1));
        m = larger(Inner::kInt8, m, __shfl_xor_sync(0xFFFFFFFFU, m, 2));
        MOESAIC_CUDA_FAULT(cuda_experts_full_groups_have_the_amax_of_a_lane, m = amax[i];)
        if (t == 0 && 8 * i < rows) add_row_amax(p, row + 8 * i, m);
      }
    }
    // store(live, channels from channel0 on, four values) of every four channels.
    const auto each = [&](const auto& store) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int channels = h * 64 + w * 16;
          const int at = 64 * h + 8 * w + 2 * i;  // channels 0 and 2; 1 and 3 are 32 further
          store(8 * i < rows && channel0 + channels < p.intermediate, channels, acc[at],
                acc[at + 32], acc[at + 1], acc[at + 33]);
        }
      }
    };
    const auto store_pairs = [&](std::byte* to) {
      each([&](bool live, int channels, float a, float b, float c, float d) {
        ptx::store_if(live, to + 2 * channels,
                      make_uint2(inner_pair<Inner>(a, b), inner_pair<Inner>(c, d)));
      });
    };
    const auto store_codes = [&](const auto& code) {
      std::byte* const to = InnerRows(p, p.rows.inner, row, channel0).template at<1>(8 * i);
      each([&](bool live, int channels, float a, float b, float c, float d) {
        ptx::store_if(live, to + channels,
                      ptx::e4m3x2(code(a), code(b)) | ptx::e4m3x2(code(c), code(d)) << 16);
      });
    };
    if constexpr (Inner::kQuantises) {
      store_codes([&](float v) { return divide(v, s, r); });
    } else if constexpr (Inner::kWholeRow) {
      if (p.whole.inner_static != nullptr) {
        r = 1.0F / p.whole.inner_static[expert];
        store_codes([&](float v) { return v * r; });
      } else {
        store_pairs(InnerRows(p, p.whole.inner_bf16, row, channel0).template at<2>(8 * i));
      }
    } else {
      store_pairs(InnerRows(p, p.rows.inner, row, channel0).template at<2>(8 * i));
    }
  }
}

}  // namespace moesaic::cuda
