#include "experts/cpu/weight_format.h"

#include <fmt/format.h>

#include <array>
#include <numeric>
#include <string>

#include "core/fault.h"

namespace moesaic::experts {
namespace {

constexpr std::int64_t kFinestFold = 16;

// How stored elements lie in the packed form. flip turns unsigned codes into two's complement
// around the middle of their range, which is then the bias of their zero point.
struct ElementRow {
  DType dtype;
  cpu::WeightKind kind;
  std::uint8_t flip = 0;
};
constexpr std::array<ElementRow, 9> kElementRows = {{
    {DType::kF32, cpu::WeightKind::kF32},
    {DType::kBF16, cpu::WeightKind::kBF16},
    {DType::kF16, cpu::WeightKind::kF16},
    {DType::kF8E4M3, cpu::WeightKind::kE4M3},
    {DType::kF4E2M1, cpu::WeightKind::kCode4},
    {DType::kI4, cpu::WeightKind::kCode4},
    {DType::kU4, cpu::WeightKind::kCode4, 0x08},
    {DType::kI8, cpu::WeightKind::kI8},
    {DType::kU8, cpu::WeightKind::kI8, 0x80},
}};

Result<ElementRow> element_row(DType dtype) {
  std::string names;
  for (const ElementRow& row : kElementRows) {
    if (row.dtype == dtype) return row;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", dtype_name(row.dtype));
  }
  return Status(StatusCode::kUnsupported,
                fmt::format("weight dtype: got {}, need one of {}", dtype_name(dtype), names));
}

cpu::GroupScaleForm group_scale_form(const OperandQuant& w) {
  using enum cpu::GroupScaleForm;
  switch (w.scale_format) {
    case ScaleFormat::kNone:
      return kNone;
    case ScaleFormat::kE8M0:
      return kE8M0;
    case ScaleFormat::kE4M3:
      return kE4M3;
    case ScaleFormat::kF32:
      break;
  }
  // Of super-blocks: as they are expanded.
  if (w.super_bits != 0 || w.scale_dtype == DType::kF32) return kF32;
  return w.scale_dtype == DType::kF16 ? kF16 : kBF16;
}

// Rows of int8 codes meet integers, and e2m1, as integers where the tier can.
void use_integer_products(const Scheme& quant, const cpu::CpuKernels& kernels, CpuWeightFormat& f) {
  struct QuadsRow {
    cpu::WeightKind kind, quads;
    int bias;
    bool e2m1 = false;
  };
  using enum cpu::WeightKind;
  constexpr std::array<QuadsRow, 4> kQuadsRows = {{{kCode4, kI4Quads, cpu::kDotBias4},
                                                   {kCode4, kE2M1Quads, 0, true},
                                                   {kI6, kI6Quads, cpu::kDotBias6},
                                                   {kI8, kI8Quads, cpu::kDotBias}}};
  if (quant.activation.dtype != DType::kI8) return;
  const bool e2m1 = quant.weight.dtype == DType::kF4E2M1;
  for (const QuadsRow& row : kQuadsRows) {
    if (row.kind != f.kind || row.e2m1 != e2m1 || kernels.grouped_gemm_i8[row.quads] == nullptr) {
      continue;
    }
    f.kind = row.quads;
    f.code_flip ^= static_cast<std::uint8_t>(row.bias);
    f.integer_products = true;
    return;
  }
}

}  // namespace

Result<CpuWeightFormat> cpu_weight_format(const Scheme& quant, const cpu::CpuKernels& kernels) {
  const OperandQuant& w = quant.weight;
  CpuWeightFormat f;
  MOESAIC_ASSIGN_OR_RETURN(const ElementRow element, element_row(w.dtype));
  f.kind = w.code_bits == 6 ? cpu::WeightKind::kI6 : element.kind;
  if (w.granularity == ScaleGranularity::kNone) return f;
  const bool block = w.granularity == ScaleGranularity::kBlock;
  if (block && w.block_n == quant::kFp8BlockSize && w.block_k == quant::kFp8BlockSize) {
    f.block_scales = true;
    return f;
  }
  const bool tables = w.table != CodeTable::kNone;
  if (tables && quant.kind == ComputeScheme::kF32 &&
      quant::code_values(w) != quant::code_values_bf16(w)) {
    return Status(StatusCode::kUnsupported,
                  "quant: the CPU kernels hold entries of a code table in bf16, the f32 scheme "
                  "wants them exact");
  }
  if (quant::rounds_scaled_codes(w)) f.kind = cpu::WeightKind::kInt4Fp8;
  if (!tables) f.code_bias = f.code_flip = element.flip;
  f.code_values = quant::code_values_bf16(w);
  if (f.code_bias != 0) {  // unsigned codes lie as two's complement
    OperandQuant flipped = w;
    flipped.dtype = DType::kI4;
    f.code_values = quant::code_values(flipped);
  }
  // A block is a group that several rows share.
  const bool group = block || w.granularity == ScaleGranularity::kGroup;
  f.group_offsets = w.zero_point != ZeroPoint::kNone || f.code_bias != 0;
  // One scale for a whole row of activations is applied with the columns' factors.
  const ScaleGranularity rows = quant.activation.granularity;
  const bool whole_rows = rows == ScaleGranularity::kTensor || rows == ScaleGranularity::kToken;
  f.column_factors =
      (!group && !f.group_offsets) || w.outer_scale != OuterScale::kNone || whole_rows;
  f.static_rows = quant::has_static_scale(quant.activation);
  // Where only whole rows have scales, the plain GEMM of e4m3 computes it.
  f.grouped = group || f.group_offsets || f.kind != cpu::WeightKind::kE4M3;
  if (group || f.group_offsets) f.group_scales = group_scale_form(w);
  if (group) {
    f.rows_per_scale = w.block_n;
    f.columns_per_scale = w.block_k;
    f.fold = std::gcd(f.fold, w.block_k);
    if (w.super_bits != 0)
      f.super = {w.super_bits, static_cast<int>(w.block_k), w.zero_point == ZeroPoint::kMin};
  }
  // A group of activations shares a scale too.
  if (quant.activation.granularity == ScaleGranularity::kGroup)
    f.fold = std::gcd(f.fold, quant.activation.block_k);
  if (f.fold < kFinestFold) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("quant.weight: got {} of {} columns, the CPU kernels need a "
                              "multiple of {}",
                              block ? "blocks" : "groups", w.block_k, kFinestFold));
  }
  // Folds are counted from the start of 256 weights.
  if (f.super.bits != 0 && quant.activation.granularity == ScaleGranularity::kGroup &&
      256 % quant.activation.block_k != 0 && !MOESAIC_FAULT(cpu_super_folds_of_any_group)) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("quant.activation: got groups of {} columns, super-blocks of 256 "
                              "weights on the CPU kernels need groups that divide 256",
                              quant.activation.block_k));
  }
  use_integer_products(quant, kernels, f);
  return f;
}

Result<CpuWeightFormats> cpu_weight_formats(const Scheme& quant, const cpu::CpuKernels& kernels) {
  MOESAIC_ASSIGN_OR_RETURN(const CpuWeightFormat common, cpu_weight_format(quant, kernels));
  const CpuWeightFormats of_both = {common, common, {quant.weight, quant.weight}};
  if (!quant.forms) return of_both;
  Scheme first = quant, second = quant;
  first.weight = quant.forms->w13;
  second.weight = quant.forms->w2;
  const Result<CpuWeightFormat> w13 = cpu_weight_format(first, kernels);
  const Result<CpuWeightFormat> w2 = cpu_weight_format(second, kernels);
  const bool alike = w13.ok() && w2.ok() && w13->integer_products == w2->integer_products;
  return alike ? CpuWeightFormats{*w13, *w2, *quant.forms} : of_both;
}

cpu::RowQuantRule cpu_row_rule(const OperandQuant& a) {
  using cpu::RowQuantRule;
  switch (a.granularity) {
    case ScaleGranularity::kToken:
      return a.dtype == DType::kI8 ? RowQuantRule::kInt8 : RowQuantRule::kFp8Token;
    case ScaleGranularity::kTensor:
      return RowQuantRule::kFp8Static;
    case ScaleGranularity::kGroup:
      break;
    default:
      return RowQuantRule::kNone;
  }
  if (a.dtype == DType::kI8) return RowQuantRule::kInt8;
  if (a.scale_format == ScaleFormat::kE4M3) return RowQuantRule::kNvfp4;
  if (a.rule == ExponentRule::kNone) return RowQuantRule::kFp8Group;
  return a.dtype == DType::kF8E4M3 ? RowQuantRule::kMxfp8 : RowQuantRule::kMxfp4;
}

}  // namespace moesaic::experts
