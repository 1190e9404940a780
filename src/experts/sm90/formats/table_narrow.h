// 4-bit indices of a table as table_bf16.h, in groups of less than 64 columns: a weight is rounded to bf16.
#pragma once

#include "experts/sm90/formats/table_bf16.h"

namespace moesaic::cuda {

struct TableNarrow : TableBf16 {
  // Two units of scales (2 bytes) and what these leave (2).
  using WeightScales = VaryingStrip<8>;
  using Weights = FromCodes<DecodeTable<StripScales<2, true>>>;
  using Promote = InOperand;
};

}  // namespace moesaic::cuda
