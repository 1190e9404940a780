// Device code of combine.h, for kernels that end with the combine.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "permute/sm90/combine.h"

namespace moesaic::cuda {

__device__ __forceinline__ void add_row(float (&sum)[8], const uint4& v) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += __uint_as_float(words[i] & 0xFFFF0000U);
  }
}

// Eight columns of a row: of bf16, or kWide: of F32.
template <bool kWide>
struct RowColumns;
template <>
struct RowColumns<false> {
  uint4 v;
  __device__ __forceinline__ void load(const void* rows, std::int64_t row, std::int64_t at) {
    v = __ldcg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(rows) + row + at));
  }
  __device__ __forceinline__ void add_to(float (&sum)[8]) const { add_row(sum, v); }
};
template <>
struct RowColumns<true> {
  float4 lo, hi;
  __device__ __forceinline__ void load(const void* rows, std::int64_t row, std::int64_t at) {
    const auto* const from =
        reinterpret_cast<const float4*>(static_cast<const float*>(rows) + row + at);
    lo = __ldcg(from);
    hi = __ldcg(from + 1);
  }
  __device__ __forceinline__ void add_to(float (&sum)[8]) const {
    sum[0] += lo.x, sum[1] += lo.y, sum[2] += lo.z, sum[3] += lo.w;
    sum[4] += hi.x, sum[5] += hi.y, sum[6] += hi.z, sum[7] += hi.w;
  }
};

// Eight columns of one token. Slots are read several at a time and added in order: each read takes
// two latencies of memory, one for the row's index and one for the row.
template <bool kWide>
__device__ __forceinline__ void combine_columns(const CombineParams& p, std::int64_t token,
                                                std::int64_t column) {
  float sum[8] = {};
  constexpr int kBatch = kWide ? 4 : 8;
  for (int j0 = 0; j0 < p.top_k; j0 += kBatch) {
    RowColumns<kWide> v[kBatch];
    bool live[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const std::int64_t pair = token * p.top_k + j0 + j;
      live[j] = j0 + j < p.top_k && p.row_of_pair[pair] >= 0;
      MOESAIC_CUDA_FAULT(cuda_combine_drops_the_last_slot,
                         live[j] = live[j] && (p.top_k == 1 || j0 + j + 1 < p.top_k);)
      if (live[j]) v[j].load(p.y2, pair * p.hidden, column);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (live[j]) v[j].add_to(sum);
    }
  }
  if (p.shared != nullptr) {
    add_row(sum, *reinterpret_cast<const uint4*>(p.shared + token * p.hidden + column));
  }
  MOESAIC_CUDA_FAULT(cuda_combine_spoils_a_shared_column, if (p.shared != nullptr) sum[0] = 0;)
  if (p.output_f32) {
    auto* const to =
        reinterpret_cast<float4*>(static_cast<float*>(p.output) + token * p.hidden + column);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  } else if (kWide && p.output_f16) {
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.output) + token * p.hidden + column) =
        make_uint4(ptx::f16x2(sum[0], sum[1]), ptx::f16x2(sum[2], sum[3]),
                   ptx::f16x2(sum[4], sum[5]), ptx::f16x2(sum[6], sum[7]));
  } else {
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.output) + token * p.hidden + column) =
        make_uint4(ptx::bf16x2(sum[0], sum[1]), ptx::bf16x2(sum[2], sum[3]),
                   ptx::bf16x2(sum[4], sum[5]), ptx::bf16x2(sum[6], sum[7]));
  }
}

}  // namespace moesaic::cuda
