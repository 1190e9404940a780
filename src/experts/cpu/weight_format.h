// How the CPU kernels hold the weights of a quantisation scheme: which GEMM reads them and what
// lies beside the codes. Pure functions of the problem.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"
#include "quant/code_values.h"
#include "quant/compute_scheme.h"

namespace moesaic::experts {

struct CpuWeightFormat {
  cpu::WeightKind kind = cpu::WeightKind::kBF16;
  bool block_scales = false;  // F32 per 128x128: panel_scales
  bool grouped = false;       // the grouped GEMM: groups of `fold` steps
  std::int64_t fold = cpu::kGroup;
  std::int64_t rows_per_scale = 1;     // rows of the matrix that share a stored scale, and
  std::int64_t columns_per_scale = 0;  // columns; 0: all
  cpu::GroupScaleForm group_scales = cpu::GroupScaleForm::kNone;  // of the packed ones
  bool group_offsets = false;   // zero points, minima, unsigned codes
  bool column_factors = false;  // one F32 per output column and expert, applied to finished sums
  bool static_rows = false;     // and with them one of the expert's for all of its rows
  std::uint8_t code_flip = 0;   // see PackedShape
  int code_bias = 0;
  // Group scales and offsets as super-blocks have them, expanded to F32 for a panel when it is met.
  cpu::SuperScaleForm super;
  quant::CodeValues code_values{};  // kCode4
  // Products are exact integers: weights as the integer kernels read them, rows of int8 codes.
  bool integer_products = false;

  cpu::PackedShape shape(cpu::RowOrder order, std::int64_t rows, std::int64_t k) const {
    return {kind, order, rows, k, grouped ? fold : 4, code_flip};
  }
};
// As the tier's kernels read it. kUnsupported (with what is missing) for formats that only the
// reference computes.
Result<CpuWeightFormat> cpu_weight_format(const Scheme& quant, const cpu::CpuKernels& kernels);

// Of both matrices: each in its own form where the scheme knows these and the tier's kernels read
// both with the same operands.
struct CpuWeightFormats {
  CpuWeightFormat w13, w2;
  MatrixForms held;  // what they hold
};
Result<CpuWeightFormats> cpu_weight_formats(const Scheme& quant, const cpu::CpuKernels& kernels);

// How the CPU kernels quantise activations; kNone for plain ones. kInt8 of a group is called group
// by group.
cpu::RowQuantRule cpu_row_rule(const OperandQuant& activation);

}  // namespace moesaic::experts
