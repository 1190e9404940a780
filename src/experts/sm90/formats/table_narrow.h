// 4-bit indices of a table as table_bf16.h, in groups of less than 64 columns: a weight is rounded to bf16.
#pragma once

#include "experts/sm90/formats/table_bf16.h"

namespace moesaic::cuda {

struct TableNarrow : TableBf16 {
  // Two units of scales (2 bytes) and their low bits (1).
  using WeightScales = VaryingStrip<6>;
  using Weights = FromCodes<DecodeTable<StripScales<2>>>;
  using Promote = InOperand;
};

}  // namespace moesaic::cuda
