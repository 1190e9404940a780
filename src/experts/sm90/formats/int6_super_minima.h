// 6-bit integers in groups of 32 columns with a minimum beside each scale (Q5_K): as int6_super.h.
#pragma once

#include "experts/sm90/formats/int6_super.h"

namespace moesaic::cuda {

struct Int6SuperMinima : Int6Super {
  // Two units of integers (1 byte), the number (2), then units of zero points (1) and offsets (2).
  using WeightScales = VaryingStrip<10>;
  using Weights = FromCodes<DecodeIntegers<SixBitCodes, SuperScales<2, true>>>;
};

}  // namespace moesaic::cuda
