// e4m3 weights with a scale per 128 x 128, activations quantised to e4m3 per row and 128 columns.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Fp8Block {
  using Product = ptx::E4M3;
  static constexpr int kChunkK = 128, kWeightBits = 8;
  using WeightScales = BlockWeightScales;
  using Tokens = GroupScaledRows;
  using Weights = FromShared;
  using Promote = PerStage;
  using Inner = QuantiseE4M3;
};

}  // namespace moesaic::cuda
