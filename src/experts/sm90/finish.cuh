// The factors of a finished sum in the grouped-GEMM kernel (grouped_gemm.cuh): formats whose weight
// rows, or token rows and weight rows, have one scale each. sum * (token scale * weight scale), as
// the CPU has it.
// Fragment positions as in gemm_products.cuh, channels as in epilogue.cuh.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/copy.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// The scale of operand row `row` of the work list, below the item's rows. The intermediate's may
// have been written by this kernel: not through L1.
__device__ __forceinline__ float token_scale(const GroupedParams& p,
                                             const std::int32_t* pair_of_row, bool second,
                                             int expert, int row) {
  const float* const fixed = second ? p.whole.inner_static : p.whole.x_static;
  if (fixed != nullptr) return fixed[expert];
  if (second) return __ldcg(p.rows.inner_scale + row);
  return p.rows.x_scale[pair_of_row[row] / p.top_k];
}

// Scales of the weight rows that a thread has of a strip: the matrix's rows `channel`, ... where
// gated also those of the same channels of the second half.
__device__ __forceinline__ const float* weight_scales(const GroupedParams& p, bool second,
                                                      bool gated, int expert) {
  const std::int64_t rows = second ? p.hidden : gated ? 2 * p.intermediate : p.intermediate;
  return (second ? p.weights.w2_scale : p.weights.w13_scale) + expert * rows;
}

// What a thread needs for the sums of an item. Those of GEMM1 are read early; the token scales of
// GEMM2 are there with the last stage.
template <class Tokens, int kLists, bool kAny = Tokens::kFactors>
struct ColumnFactors {
  static constexpr bool kTokens = Tokens::kTokenFactors;
  float token[kLists];  // of column lane + 32 i
  float weight[2][2];   // [block][row half]

  __device__ __forceinline__ void load_tokens(const GroupedParams& p,
                                              const std::int32_t* pair_of_row, const Item& item,
                                              bool second, int lane) {
    if constexpr (kTokens) {
#pragma unroll
      for (int i = 0; i < kLists; ++i) {
        const int column = lane + 32 * i;
        token[i] = column < item.rows
                       ? token_scale(p, pair_of_row, second, item.expert, item.first_row + column)
                       : 0.0F;
        MOESAIC_CUDA_FAULT(cuda_experts_row_scale_missing, token[i] = 1.0F;)
      }
    }
  }
  // kPrefetch: only brings them near.
  template <bool kPrefetch = false>
  __device__ __forceinline__ void load_weights(const GroupedParams& p, const Item& item, int band,
                                               bool second, bool gated, int group, int quarter,
                                               int lane) {
    const int g = lane >> 2;
    const int channel = gated ? band * 128 + group * 64 + quarter * 16 + g * 2
                              : band * 256 + group * 128 + quarter * 32 + g * 4;
    const float* const scales = weight_scales(p, second, gated, item.expert) + channel;
    if constexpr (kPrefetch) {
      if (channel < (second ? p.hidden : p.intermediate)) {
        ptx::prefetch_l1(scales);
        if (gated) ptx::prefetch_l1(scales + p.intermediate);
      }
      return;
    }
    float4 v = make_float4(0, 0, 0, 0);
    if (gated && channel < p.intermediate) {
      const float2 gate = *reinterpret_cast<const float2*>(scales);
      float2 up = *reinterpret_cast<const float2*>(scales + p.intermediate);
      MOESAIC_CUDA_FAULT(cuda_experts_up_rows_have_the_scale_of_gate_rows, up = gate;)
      v = make_float4(gate.x, up.x, gate.y, up.y);
    } else if (!gated && channel < (second ? p.hidden : p.intermediate)) {
      v = *reinterpret_cast<const float4*>(scales);
    }
    weight[0][0] = v.x, weight[0][1] = v.y, weight[1][0] = v.z, weight[1][1] = v.w;
  }
};
template <class Tokens, int kLists>
struct ColumnFactors<Tokens, kLists, false> {};

// Weights as the M operand.
template <int kColumns, class Sum, class Factors>
__device__ __forceinline__ void finish_columns(const Factors& factors, int lane,
                                               const Sum (&sum)[2][kColumns / 2],
                                               float (&acc)[2][kColumns / 2]) {
  const int t = lane & 3;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float s = 1.0F;
      if constexpr (Factors::kTokens) {
        s = __shfl_sync(0xFFFFFFFFU, factors.token[j / 4], (8 * j) % 32 + 2 * t + i);
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int lo = 4 * j + i, hi = lo + 2;
        acc[b][lo] = static_cast<float>(sum[b][lo]) * (s * factors.weight[b][0]);
        acc[b][hi] = static_cast<float>(sum[b][hi]) * (s * factors.weight[b][1]);
      }
    }
  }
}

// Tokens as the M operand, SwiGLU family: rows `row` and row + 8 of the item.
template <class Sum>
__device__ __forceinline__ void finish_rows(const GroupedParams& p, const std::int32_t* pair_of_row,
                                            const Item& item, bool second, int row, int lane,
                                            const Sum (&sum)[128], float (&acc)[128]) {
  const int t = lane & 3;
  float token[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    token[i] = row + 8 * i < item.rows
                   ? token_scale(p, pair_of_row, second, item.expert, item.first_row + row + 8 * i)
                   : 0.0F;
  }
  const int band = second ? item.band - p.bands1 : item.band;
  const float* const scales = weight_scales(p, second, true, item.expert);
  const auto finish = [&](int at, float weight) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      acc[at + 2 * i] = static_cast<float>(sum[at + 2 * i]) * (token[i] * weight);
    }
  };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int channel = second ? band * kBandRows + h * 128 + w * 32 + t * 8
                                 : band * 128 + h * 64 + w * 16 + t * 4;
      // Of eight channels of GEMM2, or four gate rows, then their up rows.
      float4 v[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
      if (channel < (second ? p.hidden : p.intermediate)) {
        v[0] = *reinterpret_cast<const float4*>(scales + channel);
        v[1] = *reinterpret_cast<const float4*>(scales + channel + (second ? 4 : p.intermediate));
        MOESAIC_CUDA_FAULT(cuda_experts_full_groups_have_one_scale, v[1] = v[0];)
      }
      const float lo[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
      const float hi[4] = {v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
      for (int a = 0; a < 2; ++a) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          // Element a of chunks 8b + 2w and the next: of GEMM2 channels 4a + 2b and the next, of
          // GEMM1 gate and up of channel 2a + b.
          const int at = 64 * h + 4 * (8 * b + 2 * w) + a;
          const int e = 2 * b;
          finish(at, second ? (a == 0 ? lo[e] : hi[e]) : lo[2 * a + b]);
          finish(at + 4, second ? (a == 0 ? lo[e + 1] : hi[e + 1]) : hi[2 * a + b]);
        }
      }
    }
  }
}

}  // namespace moesaic::cuda
