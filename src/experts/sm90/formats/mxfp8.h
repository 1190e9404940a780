// MXFP8 weights (e4m3 codes, a power of two per 32), bf16 operand rows: the values of MXFP8
// activations, or activations. Codes times their scales are exact in bf16 on both sides, as in
// mxfp4_bf16.h.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Mxfp8 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 8;
  using WeightScales = RowStrip<2>;
  using Tokens = FactoredRows;
  using Weights = FromCodes<DecodeMxfp8>;
  using Promote = InOperand;
  using Inner = GroupValues<RowForm::kMx8Values>;
};

}  // namespace moesaic::cuda
