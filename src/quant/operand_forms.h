// Operands as values: making the forms that schemes are put together from, and telling them apart.
// For the catalogue (scheme.cc); compile-time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>

#include "moesaic/quant.h"
#include "quant/block_scales.h"
#include "quant/mx.h"

namespace moesaic::quant::forms {

using G = ScaleGranularity;
using F = ScaleFormat;
// Columns of an int8 row that share a scale, at least and at most. A sum of 128 products of 8-bit
// codes is an integer below 2^24, exact in fp32 too.
inline constexpr std::int64_t kMinInt8RowGroup = 16, kMaxInt8RowGroup = 128;
inline constexpr DType kE4M3 = DType::kF8E4M3, kE2M1 = DType::kF4E2M1;

constexpr OperandQuant plain(DType dtype) {
  OperandQuant q;
  q.dtype = dtype;
  return q;
}
constexpr OperandQuant scaled(DType dtype, G granularity, F format, std::int64_t block_n = 0,
                              std::int64_t block_k = 0) {
  OperandQuant q = plain(dtype);
  q.granularity = granularity;
  q.scale_format = format;
  q.block_n = block_n;
  q.block_k = block_k;
  return q;
}
constexpr OperandQuant group(DType dtype, F format, std::int64_t block_k) {
  return scaled(dtype, G::kGroup, format, 1, block_k);
}
constexpr OperandQuant outer(OperandQuant q, OuterScale scale) {
  q.outer_scale = scale;
  return q;
}
// Activations: scales computed from the data at run time.
constexpr OperandQuant dynamic(OperandQuant q, ExponentRule rule = ExponentRule::kNone) {
  q.dynamic = true;
  q.rule = rule;
  return q;
}
constexpr OperandQuant token(DType dtype) { return dynamic(scaled(dtype, G::kToken, F::kF32)); }
// int8 rows for weights of a format: a scale for each group of the weights' columns, so that both
// scales change together.
// With forms, which are groups of the weights' ones, those of the coarser matrix: all of the finer
// one's are parts of them.
constexpr OperandQuant int8_rows(const OperandQuant& weight,
                                 const std::optional<MatrixForms>& forms = std::nullopt) {
  std::int64_t columns = kMaxInt8RowGroup, group_columns = weight.block_k;
  if (forms) group_columns = std::max(forms->w13.block_k, forms->w2.block_k);
  if (weight.granularity == G::kGroup) columns = std::gcd(columns, group_columns);
  return dynamic(group(DType::kI8, F::kF32, std::max(columns, kMinInt8RowGroup)));
}
constexpr OperandQuant table(OperandQuant q, CodeTable values) {
  q.table = values;
  return q;
}
constexpr OperandQuant compact(OperandQuant q, std::uint8_t code_bits, std::uint8_t super_bits) {
  q.code_bits = code_bits;
  q.super_bits = super_bits;
  return q;
}

constexpr OperandQuant with_scales_of(OperandQuant q, DType dtype) {
  q.scale_dtype = dtype;
  return q;
}

constexpr bool is_plain(const OperandQuant& q, DType dtype) {
  return q.granularity == G::kNone && q.dtype == dtype && q.table == CodeTable::kNone;
}
constexpr bool is_group(const OperandQuant& q, DType dtype, F format, std::int64_t size,
                        OuterScale outer_scale = OuterScale::kNone) {
  return q.dtype == dtype && q.granularity == G::kGroup && q.scale_format == format &&
         q.block_n == 1 && q.block_k == size && q.outer_scale == outer_scale;
}
constexpr bool is_per(const OperandQuant& q, DType dtype, G granularity) {
  return q.dtype == dtype && q.granularity == granularity && q.scale_format == F::kF32 &&
         q.outer_scale == OuterScale::kNone;
}
// Neither zero points nor an order of columns of its own, which belong to integers; no table.
constexpr bool is_bare(const OperandQuant& w) {
  return w.zero_point == ZeroPoint::kNone && !w.act_order && w.table == CodeTable::kNone &&
         w.code_bits == 0 && w.super_bits == 0 && w.scale_dtype == DType::kF32;
}
// See OperandQuant::code_bits, super_bits, scale_dtype.
constexpr bool is_compact(const OperandQuant& w) {
  const bool codes = w.code_bits == 0 || (w.code_bits == 6 && w.dtype == DType::kI8);
  const bool scales = w.super_bits == 0 ||
                      ((w.super_bits == 6 || w.super_bits == 8) && w.granularity == G::kGroup &&
                       (w.block_k == 16 || w.block_k == 32) && w.zero_point != ZeroPoint::kInteger);
  const bool half = w.scale_dtype == DType::kF16 || w.scale_dtype == DType::kBF16;
  const bool dtype =
      w.scale_dtype == DType::kF32 || (half && w.granularity == G::kGroup && w.super_bits == 0);
  return codes && scales && dtype;
}
constexpr bool is_integer(const OperandQuant& w) {
  const bool four = w.dtype == DType::kI4 || w.dtype == DType::kU4;
  const bool eight = w.dtype == DType::kI8 || w.dtype == DType::kU8;
  const bool grouped = w.granularity == G::kGroup && w.block_n == 1 && w.block_k > 0;
  return (four || eight) && (grouped || w.granularity == G::kChannel) &&
         w.scale_format == F::kF32 && w.outer_scale == OuterScale::kNone &&
         w.table == CodeTable::kNone && is_compact(w);
}
constexpr bool is_mxfp4(const OperandQuant& w) {
  return is_bare(w) && is_group(w, kE2M1, F::kE8M0, kMxGroupSize);
}
// Integers, or values that a group of int8 codes meets as exactly.
constexpr bool takes_int8_rows(const OperandQuant& w) { return is_integer(w) || is_mxfp4(w); }
// A table needs codes from 0.
constexpr bool is_table(const OperandQuant& w) {
  return w.dtype == DType::kU4 && w.granularity == G::kGroup && w.table != CodeTable::kNone &&
         w.zero_point == ZeroPoint::kNone && !w.act_order && is_integer(table(w, CodeTable::kNone));
}
// See MatrixForms: numbers in groups of this form are numbers of such weights too.
constexpr bool is_form_of(const OperandQuant& form, const OperandQuant& w) {
  const bool four = form.dtype == DType::kI4 || form.dtype == DType::kU4;
  const bool codes = form.dtype == w.dtype || (four && w.dtype == DType::kI8);
  const bool origin = form.zero_point == w.zero_point || form.zero_point == ZeroPoint::kNone;
  const bool groups = form.granularity == G::kGroup && w.granularity == G::kGroup &&
                      w.block_k > 0 && form.block_k % w.block_k == 0;
  const bool bare = w.zero_point != ZeroPoint::kInteger && !form.act_order && !w.act_order;
  const bool integers = is_integer(form) && is_integer(w);
  return groups && codes && origin && bare &&
         (integers || (is_table(form) && is_table(w) && form.table == w.table));
}

// Activations: any group that the weights' groups may have (int8_rows).
constexpr bool is_int8_group(const OperandQuant& a) {
  return a.dynamic && a.rule == ExponentRule::kNone && a.block_k >= kMinInt8RowGroup &&
         a.block_k <= kMaxInt8RowGroup && is_group(a, DType::kI8, F::kF32, a.block_k);
}
constexpr bool is_fp8_token(const OperandQuant& a) {
  return is_per(a, kE4M3, G::kToken) && a.dynamic;
}
constexpr bool is_fp8_static(const OperandQuant& a) {
  return is_per(a, kE4M3, G::kTensor) && !a.dynamic;
}
constexpr bool is_fp8_group(const OperandQuant& a, std::int64_t columns = quant::kFp8BlockSize) {
  return a.dynamic &&
         (is_group(a, kE4M3, F::kF32, columns) || is_group(a, kE4M3, F::kE8M0, columns));
}
// e4m3 weights with an F32 scale per rectangle.
constexpr bool is_fp8_blocks(const OperandQuant& w) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;  // see quant::block_scale_shape
  return is_bare(w) && is_per(w, kE4M3, G::kBlock) && w.block_n >= 1 && w.block_n <= kMost &&
         w.block_k >= 1 && w.block_k <= kMost;
}
constexpr bool is_mx_group(const OperandQuant& a, DType dtype, ExponentRule rule) {
  return is_group(a, dtype, F::kE8M0, quant::kMxGroupSize) && a.dynamic && a.rule == rule;
}

}  // namespace moesaic::quant::forms
