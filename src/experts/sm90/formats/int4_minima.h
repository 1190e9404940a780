// 4-bit integers with a minimum beside each scale (Q4_K): as int4_narrow.h, in groups of any width, with
// an offset behind the zero points.
#pragma once

#include "experts/sm90/formats/int4_narrow.h"

namespace moesaic::cuda {

struct Int4Minima : Int4Narrow {
  // As there, and two units of offsets (2 bytes).
  using WeightScales = VaryingStrip<14>;
  using Weights = FromCodes<DecodeIntegers<NibbleCodes, StripScales<2, true, true>>>;
};

}  // namespace moesaic::cuda
