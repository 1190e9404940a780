// 8-bit integers with a minimum beside each scale (Q5_K, and Q4_K beside Q6_K): as int8_narrow.h, in
// groups of any width, with an offset behind the zero points.
#pragma once

#include "experts/sm90/formats/int8_narrow.h"

namespace moesaic::cuda {

struct Int8Minima : Int8Narrow {
  // As there, and four units of offsets (2 bytes).
  using WeightScales = VaryingStrip<24>;
  using Weights = FromCodes<DecodeIntegers<ByteCodes, StripScales<4, false, true>>>;
};

}  // namespace moesaic::cuda
