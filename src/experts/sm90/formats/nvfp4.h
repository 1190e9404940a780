// NVFP4 weights (e2m1 codes, an e4m3 scale per 16, one per expert or row), bf16 operand rows:
// activations, or the values of NVFP4 activations. A code times the scale of its group has six
// significant bits and is exact in bf16; the other scales are factors on finished sums.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Nvfp4 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 4;
  using WeightScales = RowStrip<4>;
  using Tokens = FactoredRows;
  using Weights = FromCodes<DecodeNvfp4>;
  using Promote = InOperand;
  using Inner = GroupValues<RowForm::kNv4Values>;
};

}  // namespace moesaic::cuda
