// What pairs of operands mean: one row per stored weight format.
#pragma once

#include <array>
#include <string_view>

#include "moesaic/quant.h"
#include "quant/block_scales.h"
#include "quant/int4_fp8.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"
#include "quant/operand_forms.h"

namespace moesaic::quant::forms {

using Compute = ComputeScheme;

// A stored weight format. F32 activations go with all of them.
struct WeightRow {
  std::string_view text;  // for messages
  bool (*is)(const OperandQuant& weight);
  Compute with_bf16;  // activations that are BF16; kNone: not computed
  Compute (*with)(const OperandQuant& activation) = nullptr;  // any others; null: none
  bool same_groups = false;  // those have groups of as many columns as the weights' blocks
};

inline constexpr std::array<WeightRow, 13> kWeightRows = {{
    {"plain F32", [](const OperandQuant& w) { return is_bare(w) && is_plain(w, DType::kF32); },
     Compute::kNone},
    {"plain BF16", [](const OperandQuant& w) { return is_bare(w) && is_plain(w, DType::kBF16); },
     Compute::kBF16},
    {"plain F16", [](const OperandQuant& w) { return is_bare(w) && is_plain(w, DType::kF16); },
     Compute::kNone,
     [](const OperandQuant& a) {
       return is_plain(a, DType::kF16) ? Compute::kF16 : Compute::kNone;
     }},
    {"F8_E4M3 with an F32 scale per 128x128 block",
     [](const OperandQuant& w) {
       return is_fp8_blocks(w) && w.block_n == quant::kFp8BlockSize &&
              w.block_k == quant::kFp8BlockSize;
     },
     Compute::kFp8Bf16,
     [](const OperandQuant& a) { return is_fp8_group(a) ? Compute::kFp8Block : Compute::kNone; },
     true},
    {"F8_E4M3 with an F32 scale per block of another size", is_fp8_blocks, Compute::kWeightOnly,
     [](const OperandQuant& a) {
       return is_fp8_group(a, a.block_k) ? Compute::kFp8AnyBlock : Compute::kNone;
     },
     true},
    {"F8_E4M3 with an F32 scale per expert or row",
     [](const OperandQuant& w) {
       return is_bare(w) && (is_per(w, kE4M3, G::kTensor) || is_per(w, kE4M3, G::kChannel));
     },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       return is_fp8_token(a) || is_fp8_static(a) ? Compute::kFp8Scaled : Compute::kNone;
     }},
    {"F8_E4M3 with an F8_E8M0 scale per 1x32",
     [](const OperandQuant& w) {
       return is_bare(w) && is_group(w, kE4M3, F::kE8M0, quant::kMxGroupSize);
     },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       return is_mx_group(a, kE4M3, ExponentRule::kCeil) ? Compute::kMxfp8 : Compute::kNone;
     }},
    {"F4 with an F8_E8M0 scale per 1x32", is_mxfp4, Compute::kMxfp4Bf16,
     [](const OperandQuant& a) {
       if (is_int8_group(a)) return Compute::kInt8Group;
       if (is_fp8_group(a) || is_fp8_token(a) || is_fp8_static(a)) return Compute::kMxfp4Fp8;
       return is_mx_group(a, kE2M1, ExponentRule::kRound175) ? Compute::kMxfp4 : Compute::kNone;
     }},
    {"F4 with an F8_E4M3 scale per 1x16 and one per expert or row",
     [](const OperandQuant& w) {
       return is_bare(w) &&
              (is_group(w, kE2M1, F::kE4M3, quant::kNvfp4GroupSize, OuterScale::kTensor) ||
               is_group(w, kE2M1, F::kE4M3, quant::kNvfp4GroupSize, OuterScale::kChannel));
     },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       const bool same = is_group(a, kE2M1, F::kE4M3, quant::kNvfp4GroupSize, OuterScale::kTensor);
       return same && a.dynamic ? Compute::kNvfp4 : Compute::kNone;
     }},
    {"I4 with an F8_E4M3 scale per 1x128 (or another multiple of 32) and one per row",
     [](const OperandQuant& w) {
       return is_bare(w) && w.block_k > 0 && w.block_k % quant::kInt4Fp8GroupUnit == 0 &&
              is_group(w, DType::kI4, F::kE4M3, w.block_k, OuterScale::kChannel);
     },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       return is_fp8_token(a) || is_fp8_static(a) ? Compute::kInt4Fp8 : Compute::kNone;
     }},
    {"I8 with an F32 scale per row",
     [](const OperandQuant& w) { return is_bare(w) && is_per(w, DType::kI8, G::kChannel); },
     Compute::kWeightOnly,
     [](const OperandQuant& a) {
       if (is_int8_group(a)) return Compute::kInt8Group;
       return is_per(a, DType::kI8, G::kToken) && a.dynamic ? Compute::kInt8 : Compute::kNone;
     }},
    {"I4, U4, I8 or U8 with F32 scales per row or group", is_integer, Compute::kWeightOnly,
     [](const OperandQuant& a) { return is_int8_group(a) ? Compute::kInt8Group : Compute::kNone; }},
    {"U4 indices of a table with F32 scales per group", is_table, Compute::kWeightOnly},
}};

constexpr const WeightRow* weight_row(const OperandQuant& w) {
  if (w.dynamic) return nullptr;
  for (const WeightRow& row : kWeightRows) {
    if (row.is(w)) return &row;
  }
  return nullptr;
}

constexpr Compute kind_of(const OperandQuant& w, const OperandQuant& a) {
  const WeightRow* row = weight_row(w);
  if (row == nullptr) return Compute::kNone;
  if (is_plain(a, DType::kF32)) return Compute::kF32;
  if (is_plain(a, DType::kBF16)) return row->with_bf16;
  if (row->with == nullptr || (row->same_groups && a.block_k != w.block_k)) return Compute::kNone;
  return row->with(a);
}

}  // namespace moesaic::quant::forms
