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

// Eight columns of one token. Slots are read eight at a time and added in order: each read takes
// two latencies of memory, one for the row's index and one for the row.
__device__ __forceinline__ void combine_columns(const CombineParams& p, std::int64_t token,
                                                std::int64_t column) {
  float sum[8] = {};
  constexpr int kBatch = 8;
  for (int j0 = 0; j0 < p.top_k; j0 += kBatch) {
    uint4 v[kBatch];
    bool live[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const std::int64_t pair = token * p.top_k + j0 + j;
      live[j] = j0 + j < p.top_k && p.row_of_pair[pair] >= 0;
      MOESAIC_CUDA_FAULT(cuda_combine_drops_the_last_slot,
                         live[j] = live[j] && (p.top_k == 1 || j0 + j + 1 < p.top_k);)
      if (live[j]) v[j] = __ldcg(reinterpret_cast<const uint4*>(p.y2 + pair * p.hidden + column));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (live[j]) add_row(sum, v[j]);
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
  } else {
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.output) + token * p.hidden + column) =
        make_uint4(ptx::bf16x2(sum[0], sum[1]), ptx::bf16x2(sum[2], sum[3]),
                   ptx::bf16x2(sum[4], sum[5]), ptx::bf16x2(sum[6], sum[7]));
  }
}

}  // namespace moesaic::cuda
