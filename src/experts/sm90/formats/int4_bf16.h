// 4-bit integers with a scale per group of K or per row, with and without zero points; bf16
// activations. A code is an exact operand, and its scale multiplies the sums of a stage. In narrow
// groups a code times its scale is rounded to bf16 once, in registers, and nothing is promoted.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Int4Bf16 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 4;
  // A scale (2 bytes), its low bits and its zero point (1 each).
  using WeightScales = VaryingStrip<4>;
  using Tokens = PlainRows;
  using Weights = FromCodes<DecodeIntegers<NibbleCodes, ScalesOfSums>>;
  using Promote = PerStagesAndRow<2>;
  using Inner = RoundBf16;
};

}  // namespace moesaic::cuda
