// e4m3 weights with a scale per output row (or one for all), activations quantised to e4m3 with a
// scale per row. The accumulator of e4m3 products has 13 fraction bits and truncates: its sums are
// added up in fp32 every two stages, 256 elements of K.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Fp8Row {
  using Product = ptx::E4M3;
  static constexpr int kChunkK = 128, kWeightBits = 8;
  using WeightScales = NoWeightScales;
  using Tokens = RowScaledRows<RowForm::kFp8Row>;
  using Weights = FromShared;
  using Promote = PerStages<2>;
  using Inner = WholeRow<RowForm::kFp8Row>;
};

}  // namespace moesaic::cuda
