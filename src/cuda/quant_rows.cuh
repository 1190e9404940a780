// Device code of quant_rows.h, for kernels that quantise beside other work.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/fp8.cuh"
#include "cuda/group_values.h"
#include "cuda/quant_rows.h"
#include "cuda/row_codes.cuh"

namespace moesaic::cuda {

// Eight values of a row, multiplied first by its router weight unless that is null.
__device__ __forceinline__ void eight_values(const uint4& v, const float* weight, float (&f)[8]) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    f[2 * j] = bf16_low(words[j]);
    f[2 * j + 1] = bf16_high(words[j]);
  }
  if (weight == nullptr) return;
  float w = round_bf16(*weight);
  MOESAIC_CUDA_FAULT(cuda_quant_rows_ignores_the_router_weight, w = 1.0F;)
#pragma unroll
  for (float& e : f) e = round_bf16(e * w);
}

// e4m3 codes of eight values and the scale of their group of 128, which sixteen threads have together.
// All lanes of a warp call it.
struct GroupCodes {
  uint2 codes;
  float scale;
};
__device__ __forceinline__ GroupCodes group_codes(const float (&f)[8], bool power_of_two_scales) {
  float amax = 0.0F;
#pragma unroll
  for (const float e : f) amax = fmaxf(amax, fabsf(e));
#pragma unroll
  for (int d = 1; d < 16; d <<= 1) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, d));
  MOESAIC_CUDA_FAULT(cuda_quant_rows_have_the_amax_of_a_value, amax = fabsf(f[0]);)
  const float s = fp8_scale(amax, power_of_two_scales), r = 1.0F / s;
  std::uint32_t code[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    code[j] = ptx::e4m3x2(divide(f[2 * j], s, r), divide(f[2 * j + 1], s, r));
  }
  return {make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16), s};
}

// Quantises group `g` of row `m`: sixteen threads have a group of 128, each eight values `v`.
// `inside`: the thread has values; `live`: the half warp has a group.
__device__ __forceinline__ void quantize_group(const QuantRowsParams& p, std::int64_t m,
                                               std::uint32_t g, bool live, bool inside,
                                               const uint4& v) {
  const std::uint32_t part = threadIdx.x & 15;
  const std::uint32_t column = g * 128 + part * 8;
  float f[8];
  eight_values(v, p.weights != nullptr && inside ? p.weights + m : nullptr, f);
  if (p.form == RowForm::kBf16) {
    if (inside) {
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.q) + m * p.columns + column) =
          make_uint4(ptx::bf16x2(f[0], f[1]), ptx::bf16x2(f[2], f[3]), ptx::bf16x2(f[4], f[5]),
                     ptx::bf16x2(f[6], f[7]));
    }
    return;
  }
  const GroupCodes made = group_codes(f, p.power_of_two_scales);
  if (inside) {
    *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.q) + m * p.columns + column) =
        made.codes;
  }
  if (live && part == 0) p.scale[g * p.scale_stride + m] = made.scale;
}

// Groups of 128 of all tokens, or half rows.
__device__ __forceinline__ std::uint32_t count_groups(const QuantRowsParams& p) {
  return static_cast<std::uint32_t>(quant_parts(p));
}

// The local expert whose static scale row `m` has; -1: none.
__device__ __forceinline__ std::int32_t expert_of_row(const StaticRowScales& s, std::uint32_t m) {
  if (s.topk_ids == nullptr) return 0;
  std::int32_t id = s.topk_ids[m];
  if (id < 0 || id >= s.num_experts) return -1;
  if (s.expert_map != nullptr) id = s.expert_map[id];
  return id < s.num_local_experts ? id : -1;
}

// Where a row comes from, where it goes, and whose static scale it has (-1: nobody's, no row).
struct OperandRow {
  std::uint32_t from, to;
  std::int32_t expert;
};

// Which rows are made: `row` of those that depend on hidden states alone, operator() of any.
// Here those of all tokens or pairs.
struct TokenRows {
  const QuantRowsParams& p;
  __device__ __forceinline__ std::uint32_t row(std::uint32_t m) const { return m; }
  __device__ __forceinline__ OperandRow operator()(std::uint32_t m) const {
    const StaticRowScales& s = p.static_scales;
    return {s.topk_ids != nullptr ? m / static_cast<std::uint32_t>(s.top_k) : m, m,
            s.of != nullptr ? expert_of_row(s, m) : 0};
  }
};

// Rows first / 2, (first + step) / 2 ... below end / 2, a warp each: first the largest magnitude,
// then the values again, from L1. `first`, step and end are even but for the warp's second half.
template <class Rows>
__device__ __forceinline__ void quantize_whole_rows(const QuantRowsParams& p, const Rows& rows,
                                                    std::uint32_t first, std::uint32_t step,
                                                    std::uint32_t end) {
  constexpr int kAtOnce = 4, kPass = kAtOnce * 256;
  const StaticRowScales& fixed = p.static_scales;
  const auto columns = static_cast<int>(p.columns);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (std::uint32_t i = first / 2; i < end / 2; i += step / 2) {
    const auto [token, m, expert] = rows(i);
    if (expert < 0) continue;
    const std::uint16_t* const x = p.x + static_cast<std::int64_t>(token) * p.columns;
    float weight = 1.0F;
    if (p.weights != nullptr) weight = round_bf16(p.weights[token]);
    MOESAIC_CUDA_FAULT(cuda_quant_rows_ignores_the_router_weight, weight = 1.0F;)
    const auto load = [&](int at, uint4(&v)[kAtOnce]) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int column = at + u * 256 + lane * 8;
        v[u] = make_uint4(0, 0, 0, 0);
        if (column < columns) v[u] = *reinterpret_cast<const uint4*>(x + column);
      }
    };
    const auto values = [&](const uint4& v, float(&f)[8]) {
      bf16x8(v, f);
      if (p.weights == nullptr) return;
#pragma unroll
      for (float& e : f) e = round_bf16(e * weight);
    };
    const bool int8 = p.form == RowForm::kInt8Row;
    RowScale scale;
    if (fixed.of != nullptr) {
      scale = static_row_scale(fixed.of[expert]);
    } else {
      float amax = 0.0F;
      for (int at = 0; at < columns; at += kPass) {
        uint4 v[kAtOnce];
        load(at, v);
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          float f[8];
          values(v[u], f);
#pragma unroll
          for (const float e : f) amax = larger(int8, amax, fabsf(e));
        }
      }
      MOESAIC_CUDA_FAULT(cuda_quant_rows_have_the_amax_of_a_lane, if (lane != 0) amax = 0.0F;)
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        amax = larger(int8, amax, __shfl_xor_sync(0xFFFFFFFFU, amax, d));
      }
      scale = own_row_scale(int8, amax);
      if (lane == 0) p.scale[m] = scale.s;
    }
    auto* const q = static_cast<std::uint8_t*>(p.q) + static_cast<std::int64_t>(m) * p.columns;
    for (int at = 0; at < columns; at += kPass) {
      uint4 v[kAtOnce];
      load(at, v);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int column = at + u * 256 + lane * 8;
        float f[8];
        values(v[u], f);
        const uint2 codes = row_codes(int8, fixed.of != nullptr, scale, f);
        if (column < columns) *reinterpret_cast<uint2*>(q + column) = codes;
      }
    }
  }
}

// Parts of 128 columns first, first + step ... below `end` of all rows, as quantize_groups has them:
// eight values of a group are one thread's.
template <class Rows>
__device__ __forceinline__ void quantize_values(const QuantRowsParams& p, const Rows& rows,
                                                std::uint32_t first, std::uint32_t step,
                                                std::uint32_t end) {
  const auto parts = static_cast<std::uint32_t>((p.columns + 127) / 128);
  const StaticRowScales& fixed = p.static_scales;
  for (std::uint32_t i = first; (i & ~1U) < end; i += step) {
    const std::uint32_t at = i / parts, column = (i - at * parts) * 128 + (threadIdx.x & 15) * 8;
    const auto [token, m, expert] = i < end ? rows(at) : OperandRow{0, 0, 0};
    const bool inside = i < end && column < p.columns && expert >= 0;
    float f[8] = {};
    if (inside) {
      bf16x8(*reinterpret_cast<const uint4*>(p.x + static_cast<std::int64_t>(token) * p.columns +
                                             column),
             f);
      if (p.weights != nullptr) {
        float w = round_bf16(p.weights[token]);
        MOESAIC_CUDA_FAULT(cuda_quant_rows_ignores_the_router_weight, w = 1.0F;)
#pragma unroll
        for (float& e : f) e = round_bf16(e * w);
      }
    }
    float amax = 0.0F;
#pragma unroll
    for (const float e : f) amax = fmaxf(amax, fabsf(e));
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, 1));
    const int group = row_group_columns(p.form);
#pragma unroll
    for (int d = 2; d < 16; d <<= 1) {
      const float others = __shfl_xor_sync(0xFFFFFFFFU, amax, d);
      if (group > 8 * d) amax = fmaxf(amax, others);
    }
    MOESAIC_CUDA_FAULT(cuda_quant_values_have_the_amax_of_a_value, amax = fabsf(f[0]);)
    const float gscale = fixed.of != nullptr && inside ? 1.0F / fixed.of[expert] : 1.0F;
    const GroupScale scale = group_scale(p.form, amax, gscale);
    if (!inside) continue;
#pragma unroll
    for (float& e : f) e = group_value(p.form, scale, e);
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.q) +
                              static_cast<std::int64_t>(m) * p.columns + column) =
        make_uint4(ptx::bf16x2(f[0], f[1]), ptx::bf16x2(f[2], f[3]), ptx::bf16x2(f[4], f[5]),
                   ptx::bf16x2(f[6], f[7]));
  }
}

// Groups (or half rows) first, first + step ... below `end` of all tokens'; sixteen threads of
// eight values per group. `first` and first + 1 belong to the halves of one warp and step is even.
// kAtOnce groups are requested together. There are fewer than 2^31 groups. kForms: p.form is one of
// them.
template <RowForms kForms, int kAtOnce, class Rows>
__device__ __forceinline__ void quantize_groups(const QuantRowsParams& p, std::uint32_t first,
                                                std::uint32_t step, std::uint32_t end,
                                                const Rows& rows) {
  if constexpr (kForms == RowForms::kAll) {
    if (row_is_whole(p.form)) return quantize_whole_rows(p, rows, first, step, end);
    if (row_has_values(p.form)) return quantize_values(p, rows, first, step, end);
  }
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
      row[u] = rows.row(m);
      group[u] = g;
      live[u] = i < end;
      inside[u] = live[u] && column < p.columns;
      v[u] = make_uint4(0, 0, 0, 0);
      if (inside[u]) {
        v[u] = *reinterpret_cast<const uint4*>(p.x + static_cast<std::int64_t>(row[u]) * p.columns +
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

template <RowForms kForms, int kAtOnce = 1>
__device__ __forceinline__ void quantize_groups(const QuantRowsParams& p, std::uint32_t first,
                                                std::uint32_t step, std::uint32_t end) {
  quantize_groups<kForms, kAtOnce>(p, first, step, end, TokenRows{p});
}

}  // namespace moesaic::cuda
