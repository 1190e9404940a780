// 8-bit integers with a scale per group of K or per row, with and without zero points; bf16
// activations. As int4_bf16.h.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Int8Bf16 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 8;
  // A scale (2 bytes), its low bits and its zero point (1 each).
  using WeightScales = VaryingStrip<4>;
  using Tokens = PlainRows;
  using Weights = FromCodes<DecodeIntegers<ByteCodes, ScalesOfSums>>;
  using Promote = PerStagesAndRow<2>;
  using Inner = RoundBf16;
};

}  // namespace moesaic::cuda
