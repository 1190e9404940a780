// bf16 weights and activations.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Bf16 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 16;
  using WeightScales = NoWeightScales;
  using Tokens = PlainRows;
  using Weights = FromShared;
  using Promote = InOperand;
  using Inner = RoundBf16;
};

}  // namespace moesaic::cuda
