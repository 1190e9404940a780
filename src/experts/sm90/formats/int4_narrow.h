// 4-bit integers as int4_bf16.h, in groups of less than 64 columns: a weight is rounded to bf16.
#pragma once

#include "experts/sm90/formats/int4_bf16.h"

namespace moesaic::cuda {

struct Int4Narrow : Int4Bf16 {
  // Two units of scales (2 bytes), what these leave (2) and zero points (1).
  using WeightScales = VaryingStrip<10>;
  using Weights = FromCodes<DecodeIntegers<NibbleCodes, StripScales<2, true>>>;
  using Promote = InOperand;
};

}  // namespace moesaic::cuda
