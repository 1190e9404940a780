// Operand rows of GEMM1 from hidden states, on the device: quantisation to e4m3 or int8 per group
// of 128 columns or per row, to the values of microscaling formats, or a bf16 copy, with the router
// weight multiplied in first where the model asks for it.
#pragma once

#include <cstdint>

#include "cuda/device_traits.h"

namespace moesaic::cuda {

// How operand rows are written down before a GEMM reads them.
enum class RowForm : std::uint8_t {
  kBf16,
  kFp8Group128,  // e4m3 codes and one F32 scale per row and 128 columns
  kFp8Row,       // e4m3 codes and one F32 scale per row, or the expert's static one
  kInt8Row,      // int8 codes and one F32 scale per row
  // bf16 values that codes in small groups stand for (group_values.h):
  kMx8Values,  // e4m3 per 32 columns, a power of two that saturates nothing
  kMx4Values,  // e2m1 per 32 columns, a power of two rounded at 1.75
  kNv4Values,  // e2m1 per 16 columns, an e4m3 scale; without the expert's static input scale
  kFp8Values,  // e4m3 per 128 columns, a power of two as of kFp8Group128
  kF16,        // F16 values
};
constexpr bool row_is_quantised(RowForm form) {
  return form != RowForm::kBf16 && form != RowForm::kF16;
}
constexpr bool row_has_values(RowForm form) {
  return form >= RowForm::kMx8Values && form <= RowForm::kFp8Values;
}
// Of a row whose groups are written down as values.
constexpr int row_group_columns(RowForm form) {
  return form == RowForm::kFp8Values ? 128 : form == RowForm::kNv4Values ? 16 : 32;
}
constexpr int row_element_bytes(RowForm form) {
  return row_is_quantised(form) && !row_has_values(form) ? 1 : 2;
}
constexpr bool row_has_scales(RowForm form) {
  return row_is_quantised(form) && !row_has_values(form);
}
// What these rows are multiplied to is kept in F32 until it is summed, not in bf16.
constexpr bool row_has_wide_result(RowForm form) { return form == RowForm::kF16; }
// One scale for all of a row: a factor on finished sums.
constexpr bool row_is_whole(RowForm form) {
  return form == RowForm::kFp8Row || form == RowForm::kInt8Row;
}

// The forms that a kernel has code for: the two of groups and bf16, or all. A launch of few tokens
// mostly waits for instructions, and has none that its rows do not need.
enum class RowForms : std::uint8_t { kGroups, kAll };
constexpr RowForms forms_with(RowForm form) {
  return form == RowForm::kBf16 || form == RowForm::kFp8Group128 ? RowForms::kGroups
                                                                 : RowForms::kAll;
}

// kFp8Row, kNv4Values: scales that come with the weights. `of` [num_local_experts], or null: each
// row its own.
struct StaticRowScales {
  const float* of = nullptr;
  // Null: one row per token, the scales are all equal. Otherwise a row per pair, that of the expert
  // which topk_ids [tokens * top_k] names; pairs without a local expert get no row.
  const std::int32_t* topk_ids = nullptr;
  const std::int32_t* expert_map = nullptr;  // [num_experts] or null: identity
  std::int32_t num_experts = 0, num_local_experts = 0, top_k = 1;
};

struct QuantRowsParams {
  const std::uint16_t* x = nullptr;  // [tokens, columns] bf16, 16-byte aligned, columns % 8 == 0
  const float* weights = nullptr;    // [tokens]: x = bf16(x * bf16(weight)) first; null: not
  std::int64_t tokens = 0;
  std::int64_t columns = 0;
  bool power_of_two_scales = false;
  // q [tokens, columns] of that form (a row per pair: [tokens * top_k, columns]); with scales:
  // scale [ceil(columns/128)][scale_stride], of whole rows [tokens] (static ones are not written).
  RowForm form = RowForm::kFp8Group128;
  void* q = nullptr;
  float* scale = nullptr;
  std::int64_t scale_stride = 0;
  StaticRowScales static_scales;
};

// Rows that are made: tokens or pairs.
constexpr std::int64_t made_rows(const QuantRowsParams& p) {
  return p.static_scales.topk_ids != nullptr ? p.tokens * p.static_scales.top_k : p.tokens;
}
// Parts of the work, each for half a warp: groups of 128 columns, or half a whole row.
constexpr std::int64_t quant_parts(const QuantRowsParams& p) {
  return made_rows(p) * (row_is_whole(p.form) ? 2 : (p.columns + 127) / 128);
}

// The codes and scales of ref_quantize_row (experts/reference/operand.h), bit for bit, but for NaN,
// which stays NaN in e4m3, and -0, which may become +0. Returns a cudaError_t value.
int launch_quant_rows(const QuantRowsParams& params, const DeviceTraits& device, void* stream);

}  // namespace moesaic::cuda
