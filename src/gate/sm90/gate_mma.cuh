// What the tensor-core kernels of the gate share: how K is cut, and the instructions.
//
// K is cut into 32 slices of whole 16-element steps, the last ones padded with zeros. A slice is a
// chain of m16n8k16 multiplies into one fp32 accumulator, ascending. Four neighbouring slices are
// added in order, then the eight sums of four, in order, then the bias. So a logit's bits depend on
// its two rows alone, whatever tile, cluster or launch computed it.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/sync.cuh"
#include "gate/sm90/gate.h"

namespace moesaic::cuda {

// The four registers of each lane of four 8x8 matrices of 16-bit elements, and of two.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[2], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address));
}
// d [16 experts, 8 tokens] += a [16 experts, 16 k] * b [16 k, 8 tokens], of bf16 or F16.
template <bool kHalf>
__device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  if constexpr (kHalf) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// A warp's slice of 16 experts and Tokens tokens (8 or a multiple of 16) of which `left` are there:
// `experts` and `tokens` are the shared addresses of the operands' first rows at the slice; rows
// lie `pitch` bytes apart, an odd number of 16-byte pieces.
template <bool kHalf, int Tokens>
__device__ __forceinline__ void multiply_slice(std::uint32_t experts, std::uint32_t tokens,
                                               std::uint32_t pitch, int steps, int left,
                                               float (&part)[Tokens / 8][4]) {
  const auto lane = threadIdx.x & 31U;
#pragma unroll
  for (auto& fragment : part) {
#pragma unroll
    for (float& v : fragment) v = 0;
  }
  const std::uint32_t a_at = experts + (lane & 15) * pitch + (lane >> 4) * 16;
  const std::uint32_t b_row = (Tokens < 16 ? 0 : (lane >> 4) * 8) + (lane & 7);
  const std::uint32_t b_at = tokens + b_row * pitch + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int s = 0; s < steps; ++s) {
    const std::uint32_t k = static_cast<std::uint32_t>(s) * 32;
    std::uint32_t a[4];
    load_matrices(a, a_at + k);
    if constexpr (Tokens < 16) {
      std::uint32_t b[2];
      load_matrices(b, b_at + k);
      multiply<kHalf>(part[0], a, b[0], b[1]);
    } else {
#pragma unroll
      for (int n = 0; n < Tokens / 8; n += 2) {
        if (n * 8 >= left) break;  // fragments of tokens that are not there cost nothing
        std::uint32_t b[4];
        load_matrices(b, b_at + static_cast<std::uint32_t>(n * 8) * pitch + k);
        multiply<kHalf>(part[n], a, b[0], b[1]);
        multiply<kHalf>(part[n + 1], a, b[2], b[3]);
      }
    }
  }
}

// A warp's part of a block's sums: to[token][expert] with rows of `pitch` floats; pitches of
// 4 more than a multiple of 16 meet no bank twice.
template <int Tokens>
__device__ __forceinline__ void store_part(float* to, int pitch, int first_expert,
                                           const float (&part)[Tokens / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int row = first_expert + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < Tokens / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[(column + n * 8 + i % 2) * pitch + row + i / 2 * 8] = part[n][i];
    }
  }
}
// Four neighbouring slices of the logits of four experts; slices lie `stride` floats apart.
__device__ __forceinline__ void sum_of_slices(const float* sums, int stride, float (&sum)[4]) {
  float4 part[kGateSlicesOfGroup];
#pragma unroll
  for (int s = 0; s < kGateSlicesOfGroup; ++s) {
    part[s] = *reinterpret_cast<const float4*>(sums + s * stride);
  }
  sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
  for (const float4& v : part) {
    MOESAIC_CUDA_FAULT(cuda_gate_first_slice_of_k_missing, if (&v == part) continue;)
    sum[0] = __fadd_rn(sum[0], v.x);
    sum[1] = __fadd_rn(sum[1], v.y);
    sum[2] = __fadd_rn(sum[2], v.z);
    sum[3] = __fadd_rn(sum[3], v.w);
  }
}
// All eight groups of one logit.
__device__ __forceinline__ float sum_of_groups(const float* sums, int stride) {
  float sum = 0;
#pragma unroll
  for (int g = 0; g < kGateGroups; ++g) {
    MOESAIC_CUDA_FAULT(cuda_gate_first_group_of_k_missing, if (g == 0) continue;)
    sum = __fadd_rn(sum, sums[g * stride]);
  }
  return sum;
}

__device__ __forceinline__ void store_logit(const GateParams& p, std::int64_t expert,
                                            std::int64_t token, float v) {
  if (expert >= p.experts || token >= p.tokens) return;
  p.logits[token * p.experts + expert] = p.bias != nullptr ? __fadd_rn(v, p.bias[expert]) : v;
  MOESAIC_CUDA_FAULT(cuda_gate_bias_missing, p.logits[token * p.experts + expert] = v;)
}

}  // namespace moesaic::cuda
