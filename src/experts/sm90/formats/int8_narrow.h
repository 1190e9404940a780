// 8-bit integers as int8_bf16.h, in groups of less than 64 columns: a weight is rounded to bf16.
#pragma once

#include "experts/sm90/formats/int8_bf16.h"

namespace moesaic::cuda {

struct Int8Narrow : Int8Bf16 {
  // Four units of scales (2 bytes), their low bits and zero points (1 each).
  using WeightScales = VaryingStrip<16>;
  using Weights = FromCodes<DecodeIntegers<ByteCodes, StripScales<4, false>>>;
  using Promote = InOperand;
};

}  // namespace moesaic::cuda
