// MXFP4 weights (e2m1 codes, a power of two per 32), bf16 activations. A code times its scale is
// exact in bf16: it becomes an operand in registers, and nothing is promoted.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Mxfp4Bf16 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 4;
  using WeightScales = RowStrip<2>;
  using Tokens = PlainRows;
  using Weights = FromCodes<DecodeE2M1>;
  using Promote = InOperand;
  using Inner = RoundBf16;
};

}  // namespace moesaic::cuda
