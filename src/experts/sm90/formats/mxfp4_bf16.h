// MXFP4 weights (e2m1 codes, a power of two per 32), bf16 operand rows: activations, or the values
// of MXFP4 ones, or those of e4m3 ones with a power of two per 128. A code times its scale is exact
// in bf16: it becomes an operand in registers, and nothing is promoted. Rows whose scales have no
// bf16 factor are shifted; the factor on finished sums takes that back.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Mxfp4Bf16 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 4;
  using WeightScales = RowStrip<2>;
  using Tokens = FactoredRows;
  using Weights = FromCodes<DecodeE2M1>;
  using Promote = InOperand;
  using Inner = GroupValues<RowForm::kMx4Values, RowForm::kFp8Values>;
};

}  // namespace moesaic::cuda
