// 6-bit integers with a minimum beside each scale (Q5_K, Q5_1): as int8_minima.h.
#pragma once

#include "experts/sm90/formats/int8_minima.h"

namespace moesaic::cuda {

struct Int6Minima : Int8Minima {
  static constexpr int kWeightBits = 6;
  using Weights = FromCodes<DecodeIntegers<SixBitCodes, StripScales<4, false, true>>>;
};

}  // namespace moesaic::cuda
