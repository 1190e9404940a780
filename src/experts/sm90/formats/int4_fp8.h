// int4 weights times an e4m3 scale per 128, rounded to e4m3, and a scale per output row; activations
// quantised to e4m3 with a scale per row. Sums as in fp8_row.h.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Int4Fp8 {
  using Product = ptx::E4M3;
  static constexpr int kChunkK = 128, kWeightBits = 4;
  using WeightScales = RowStrip<8>;
  using Tokens = RowScaledRows<RowForm::kFp8Row>;
  using Weights = FromFp8Codes<DecodeInt4Fp8>;
  using Promote = PerStages<2>;
  using Inner = WholeRow<RowForm::kFp8Row>;
};

}  // namespace moesaic::cuda
