// 6-bit integers in groups of 16 columns whose scales are integers times one number of a chunk (Q6_K): as
// int6_narrow.h.
#pragma once

#include "experts/sm90/formats/int6_narrow.h"

namespace moesaic::cuda {

struct Int6Super : Int6Narrow {
  // Four units of integers (1 byte), and the number (2).
  using WeightScales = VaryingStrip<6>;
  using Weights = FromCodes<DecodeIntegers<SixBitCodes, SuperScales<4>>>;
};

}  // namespace moesaic::cuda
