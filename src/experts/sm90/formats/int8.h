// int8 weights with a scale per output row, activations quantised to int8 with a scale per row.
// Sums are exact integers: |sum| <= 2^14 K, so K up to 2^17 - 1.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Int8 {
  using Product = ptx::S8;
  static constexpr int kChunkK = 128, kWeightBits = 8;
  using WeightScales = NoWeightScales;
  using Tokens = RowScaledRows<RowForm::kInt8Row>;
  using Weights = FromShared;
  using Promote = Integers;
  using Inner = WholeRow<RowForm::kInt8Row>;
};

}  // namespace moesaic::cuda
