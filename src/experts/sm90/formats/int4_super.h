// 4-bit integers in groups of 16 columns whose scales are integers times one number of a chunk (Q3_K): as
// int4_narrow.h.
#pragma once

#include "experts/sm90/formats/int4_narrow.h"

namespace moesaic::cuda {

struct Int4Super : Int4Narrow {
  // Four units of integers (1 byte), and the number (2).
  using WeightScales = VaryingStrip<6>;
  using Weights = FromCodes<DecodeIntegers<NibbleCodes, SuperScales<4>>>;
};

}  // namespace moesaic::cuda
