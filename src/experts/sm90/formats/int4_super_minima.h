// 4-bit integers in groups of 16 columns with a minimum beside each scale (Q2_K): as int4_super.h.
#pragma once

#include "experts/sm90/formats/int4_super.h"

namespace moesaic::cuda {

struct Int4SuperMinima : Int4Super {
  // As there, then four units of zero points (1 byte) and offsets (2).
  using WeightScales = VaryingStrip<18>;
  using Weights = FromCodes<DecodeIntegers<NibbleCodes, SuperScales<4, true>>>;
};

}  // namespace moesaic::cuda
