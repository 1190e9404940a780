// What happens to a finished accumulator tile: activation, rounding and requantisation after GEMM1,
// weighting and rounding after GEMM2. Fragment positions as in gemm_products.cuh; which weight row
// is which channel is fixed by the repacking (repack.h). Tokens as the M operand: epilogue_rows.cuh.
#pragma once

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/fp8.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/store.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/activation.cuh"
#include "experts/sm90/column_maxima.cuh"
#include "experts/sm90/gemm_layout.cuh"
#include "experts/sm90/value_rows.cuh"
#include "experts/sm90/whole_rows.cuh"

namespace moesaic::cuda {

// How the eight warps that hold one requantisation group exchange the largest magnitudes of its
// columns: through the CTA's shared memory, or (split) through that of both CTAs of a cluster.
template <bool kSplit>
struct AmaxExchange {
  float* amax;    // [8 warps][columns]
  float2* scale;  // [requantisation groups of the CTA][columns]: scale and reciprocal
  std::uint32_t address = 0, bar = 0,
                parity = 0;  // split: of amax, its barrier and that one's phase

  // Split builds alternate between two buffers: a CTA can be one item ahead of the other.
  template <class Shared>
  __device__ __forceinline__ AmaxExchange(const Shared& sh, RingPosition<2>& position) {
    constexpr int kWords = Shared::L::kAmaxWords;
    amax = sh.amax() + (kSplit ? position.slot() * kWords : 0);
    scale = reinterpret_cast<float2*>(sh.amax() + (kSplit ? 2 : 1) * kWords);
    if constexpr (kSplit) {
      address = ptx::shared_address(amax);
      bar = sh.amax_full(position.slot());
      parity = position.parity();
      position.advance();
    }
  }
  __device__ __forceinline__ void publish(int at, float m) const {
    if constexpr (kSplit) {
#pragma unroll
      for (std::uint32_t cta = 0; cta < 2; ++cta) {
        ptx::store_remote_async(address + static_cast<std::uint32_t>(at) * 4, __float_as_uint(m),
                                bar, cta);
      }
    } else {
      amax[at] = m;
    }
  }
  // Waits until all warps have stored theirs for `columns` columns. Split: only the first `columns`
  // threads see them.
  __device__ __forceinline__ void wait(int thread, int columns) const {
    if constexpr (kSplit) {
      if (thread == 0) {
        ptx::mbarrier_arrive_expect(bar, static_cast<std::uint32_t>(8 * columns) * 4);
      }
      if (thread < columns) ptx::mbarrier_wait(bar, parity);
    } else {
      ptx::named_barrier_sync(kRequantBarrier, 256);
    }
  }
};

// GEMM1's result as operand rows of 16 bits have it.
template <class Inner>
__device__ __forceinline__ float round_inner(float v) {
  if constexpr (!Inner::kF16) return round_bf16(v);
  MOESAIC_CUDA_FAULT(cuda_experts_f16_intermediate_in_bf16, return round_bf16(v);)
  return round_f16(v);
}
template <class Inner>
__device__ __forceinline__ std::uint32_t inner_pair(float lo, float hi) {
  return Inner::kF16 ? ptx::f16x2(lo, hi) : ptx::bf16x2(lo, hi);
}

// Four neighbouring channels of GEMM2's row, as bf16, or kWide: F32.
template <bool kWide, bool kStreams>
__device__ __forceinline__ void store_channels_if(bool condition, std::byte* to, const float4& v) {
  if constexpr (kWide) {
    ptx::store_if<kStreams>(condition, to,
                            make_uint4(__float_as_uint(v.x), __float_as_uint(v.y),
                                       __float_as_uint(v.z), __float_as_uint(v.w)));
  } else {
    ptx::store_if<kStreams>(condition, to,
                            make_uint2(ptx::bf16x2(v.x, v.y), ptx::bf16x2(v.z, v.w)));
  }
}

// GEMM2: y2[pair][256 band + 128 group + 32 warp + 4 g + {0..3}] = factor * (acc + bias), as bf16, or
// kWide: F32.
template <bool kWide, bool kStreams, int kColumns>
__device__ __forceinline__ void store_weighted(const GroupedParams& p, int expert, int band,
                                               int group, int warp, int lane,
                                               const std::int32_t (&pair)[(kColumns + 31) / 32],
                                               const float (&factor)[(kColumns + 31) / 32],
                                               const float (&acc)[2][kColumns / 2]) {
  const int g = lane >> 2, t = lane & 3;
  const int channel = band * kBandRows + group * 128 + warp * 32 + g * 4;
  const bool inside = channel < p.hidden;
  float4 bias = make_float4(0, 0, 0, 0);
  if (p.weights.w2_bias != nullptr && inside) {
    bias = *reinterpret_cast<const float4*>(p.weights.w2_bias +
                                            static_cast<std::int64_t>(expert) * p.hidden + channel);
  }
  MOESAIC_CUDA_FAULT(cuda_experts_w2_bias_missing, bias = make_float4(0, 0, 0, 0);)
  constexpr std::uint32_t kBytes = kWide ? 4 : 2;
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(p.hidden) * kBytes;
  std::byte* y2 = static_cast<std::byte*>(p.rows.y2) + channel * std::int64_t{kBytes};
  asm volatile("" : "+l"(y2));  // one sum for each address
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int source_lane = (8 * j) % 32 + 2 * t + i;
      const std::int32_t row = __shfl_sync(0xFFFFFFFFU, pair[j / 4], source_lane);
      const float w = __shfl_sync(0xFFFFFFFFU, factor[j / 4], source_lane);
      const float4 v = {(acc[0][4 * j + i] + bias.x) * w, (acc[0][4 * j + 2 + i] + bias.y) * w,
                        (acc[1][4 * j + i] + bias.z) * w, (acc[1][4 * j + 2 + i] + bias.w) * w};
      store_channels_if<kWide, kStreams>(
          row >= 0 && inside,
          y2 + static_cast<std::uint64_t>(static_cast<std::uint32_t>(row)) * row_bytes, v);
    }
  }
}

// Scales of the columns' groups of 128 channels, by largest magnitude (fmaxf drops NaN, as the CPU
// does), to all warps: exchange.scale has scale and reciprocal. store(which group, column, scale) by
// one thread each.
template <bool kGated, int kColumns, bool kSplit, class Store>
__device__ __forceinline__ void share_scales(const AmaxExchange<kSplit>& exchange, int group,
                                             int quarter, int lane, bool power_of_two,
                                             const float (&acc)[2][kColumns / 2],
                                             const Store& store) {
  constexpr int kGroups = kGated ? 1 : 2;
  const ColumnMaxima<kColumns / 4> maxima(column_magnitudes<kGated, kColumns>(acc).of, lane);
  if (maxima.own) {
    maxima.each(lane, [&](int column, float m) {
      exchange.publish((group * 4 + quarter) * kColumns + column, m);
    });
  }
  const int thread = static_cast<int>(threadIdx.x);
  exchange.wait(thread, kColumns);
  if (thread < kColumns * kGroups) {
    const int column = thread % kColumns, which = thread / kColumns;
    float m = 0.0F;
#pragma unroll
    for (int w = 0; w < 8 / kGroups; ++w) {
      MOESAIC_CUDA_FAULT(cuda_experts_amax_of_half_a_group, if (w >= 4 / kGroups) continue;)
      m = fmaxf(m, exchange.amax[(which * 4 + w) * kColumns + column]);
    }
    const float s = fp8_scale(m, power_of_two);
    exchange.scale[which * kColumns + column] = make_float2(s, 1.0F / s);
    store(which, column, s);
  }
  ptx::named_barrier_sync(kRequantBarrier, kSplit ? 128 : 256);
}

// The e4m3 codes of all channels under the scales of share_scales, as values.
template <bool kGated, int kColumns, bool kSplit>
__device__ __forceinline__ void values_of_codes(const AmaxExchange<kSplit>& exchange, int lane,
                                                float (&acc)[2][kColumns / 2]) {
  static_assert(kGated);
  const float2* const scale = exchange.scale + 2 * (lane & 3);
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 s = scale[8 * j + i];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        acc[b][4 * j + i] =
            group_value(RowForm::kFp8Values, GroupScale{s.y, s.x}, acc[b][4 * j + i]);
      }
    }
  }
}

// GEMM1: activation, rounding to bf16 (or F16) and, where the format does, quantisation per row and 128
// channels. The consumer groups hold one 128-channel group together (gated) or one each (plain).
template <class Inner, class Epilogue, int kColumns, bool kSplit>
__device__ __forceinline__ void store_activated(const GroupedParams& p, int expert, int band,
                                                int first_row, int rows, int group, int quarter,
                                                int lane, const AmaxExchange<kSplit>& exchange,
                                                float (&acc)[2][kColumns / 2]) {
  constexpr bool kGated = Epilogue::kGated;
  static_assert(kGated || !kSplit);
  const int g = lane >> 2, t = lane & 3;
  // First of this thread's neighbouring channels: two (gated) or four.
  const int channel = kGated ? band * 128 + group * 64 + quarter * 16 + g * 2
                             : band * 256 + group * 128 + quarter * 32 + g * 4;
  const bool inside = channel < p.intermediate;
  if constexpr (kGated) {
    float2 gate_bias = make_float2(0, 0), up_bias = make_float2(0, 0);
    if (p.weights.w13_bias != nullptr && inside) {
      const float* bias =
          p.weights.w13_bias + static_cast<std::int64_t>(expert) * 2 * p.intermediate;
      gate_bias = *reinterpret_cast<const float2*>(bias + channel);
      up_bias = *reinterpret_cast<const float2*>(bias + p.intermediate + channel);
    }
    MOESAIC_CUDA_FAULT(cuda_experts_w13_bias_missing, gate_bias = up_bias = make_float2(0, 0);)
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float y = Epilogue::activate(
              p.activation, acc[b][4 * j + i] + (b == 0 ? gate_bias.x : gate_bias.y),
              acc[b][4 * j + 2 + i] + (b == 0 ? up_bias.x : up_bias.y));
          // Rows past the matrix hold whatever shared memory held: select, do not multiply.
          acc[b][4 * j + i] = inside ? round_inner<Inner>(y) : 0.0F;
        }
      }
    }
  } else {
    float4 bias = make_float4(0, 0, 0, 0);
    if (p.weights.w13_bias != nullptr && inside) {
      bias = *reinterpret_cast<const float4*>(
          p.weights.w13_bias + static_cast<std::int64_t>(expert) * p.intermediate + channel);
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int e = 0; e < kColumns / 2; ++e) {
        const bool high = (e & 2) != 0;
        const float v = acc[b][e] + (b == 0 ? (high ? bias.y : bias.x) : (high ? bias.w : bias.z));
        acc[b][e] = inside ? round_inner<Inner>(Epilogue::activate(p.activation, v, 0.0F)) : 0.0F;
      }
    }
  }

  const InnerRows inner(p, p.rows.inner, first_row, channel);
  if constexpr (Inner::kWholeRow) {
    store_whole_columns<Inner, kGated, kColumns>(p, expert, first_row, rows, channel, inside, lane,
                                                 acc);
  } else if constexpr (!Inner::kQuantises) {
    if constexpr (Inner::kValues && kSplit) {
      // The other half of a group of 128 is the other CTA's.
      if (Inner::can(RowForm::kFp8Values) && p.inner_values == RowForm::kFp8Values) {
        share_scales<kGated, kColumns>(exchange, group, quarter, lane, true, acc,
                                       [](int, int, float) {});
        values_of_codes<kGated, kColumns>(exchange, lane, acc);
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * j + 2 * t + i;
        const bool live = column < rows && inside;
        std::byte* const to = inner.template at<2>(column);
        if constexpr (kGated) {
          ptx::store_if(live, to, inner_pair<Inner>(acc[0][4 * j + i], acc[1][4 * j + i]));
        } else {
          ptx::store_if(live, to,
                        make_uint2(inner_pair<Inner>(acc[0][4 * j + i], acc[0][4 * j + 2 + i]),
                                   inner_pair<Inner>(acc[1][4 * j + i], acc[1][4 * j + 2 + i])));
        }
      }
    }
    if constexpr (Inner::kValues) {
      const auto in_form = [&]<RowForm kForm>() {
        if constexpr (Inner::can(kForm) && !(kSplit && row_group_columns(kForm) > 64)) {
          if (p.inner_values == kForm) {
            quantise_stored<kForm, kGated>(p, expert, first_row, rows, band * (kGated ? 128 : 256),
                                           group, quarter, lane);
          }
        }
      };
      in_form.template operator()<RowForm::kMx8Values>();
      in_form.template operator()<RowForm::kMx4Values>();
      in_form.template operator()<RowForm::kNv4Values>();
      in_form.template operator()<RowForm::kFp8Values>();
    }
    return;
  } else {
    const auto store_scale = [&](int which, int column, float s) {
      const int scale_group = kGated ? band : band * 2 + which;
      if (column < rows && scale_group < p.chunks2 && (!kSplit || group == 0)) {
        p.rows.inner_scale[scale_group * p.rows.inner_scale_stride + first_row + column] = s;
        MOESAIC_CUDA_FAULT(
            cuda_experts_requantised_with_another_scale,
            p.rows.inner_scale[scale_group * p.rows.inner_scale_stride + first_row + column] =
                1.0F;)
      }
    };
    share_scales<kGated, kColumns>(exchange, group, quarter, lane, p.power_of_two_scales, acc,
                                   store_scale);
    const float2* const scale = exchange.scale + (kGated ? 0 : group * kColumns);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float4 s = *reinterpret_cast<const float4*>(scale + 8 * j + 2 * t);
      if constexpr (kGated) {
        // Two channels of two tokens; neighbours swap halves so that each stores four channels.
        const std::uint32_t own =
            ptx::e4m3x2(divide(acc[0][4 * j], s.x, s.y), divide(acc[1][4 * j], s.x, s.y)) |
            ptx::e4m3x2(divide(acc[0][4 * j + 1], s.z, s.w), divide(acc[1][4 * j + 1], s.z, s.w))
                << 16;
        const std::uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, own, 4);
        const bool odd = (g & 1) != 0;
        const std::uint32_t v =
            odd ? __byte_perm(other, own, 0x7632) : __byte_perm(own, other, 0x5410);
        const int column = 8 * j + 2 * t + (odd ? 1 : 0);
        ptx::store_if(column < rows && inside, inner.template at<1>(column) - (odd ? 2 : 0), v);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sc = i == 0 ? s.x : s.z, r = i == 0 ? s.y : s.w;
          const std::uint32_t v =
              ptx::e4m3x2(divide(acc[0][4 * j + i], sc, r), divide(acc[0][4 * j + 2 + i], sc, r)) |
              ptx::e4m3x2(divide(acc[1][4 * j + i], sc, r), divide(acc[1][4 * j + 2 + i], sc, r))
                  << 16;
          const int column = 8 * j + 2 * t + i;
          ptx::store_if(column < rows && inside, inner.template at<1>(column), v);
        }
      }
    }
  }
}

}  // namespace moesaic::cuda
