// F16 weights and activations.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct F16 {
  using Product = ptx::F16;
  static constexpr int kChunkK = 64, kWeightBits = 16;
  using WeightScales = NoWeightScales;
  using Tokens = HalfRows;
  using Weights = FromShared;
  using Promote = InOperand;
  using Inner = RoundF16;
};

}  // namespace moesaic::cuda
