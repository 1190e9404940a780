// 6-bit integers in groups of less than 64 columns (Q5_0): as int8_narrow.h.
#pragma once

#include "experts/sm90/formats/int8_narrow.h"

namespace moesaic::cuda {

struct Int6Narrow : Int8Narrow {
  static constexpr int kWeightBits = 6;
  using Weights = FromCodes<DecodeIntegers<SixBitCodes, StripScales<4, false>>>;
};

}  // namespace moesaic::cuda
