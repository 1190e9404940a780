// 4-bit indices of a table (nf4, fp4, IQ4) with a scale per group of K, bf16 activations; as
// int4_bf16.h.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct TableBf16 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 4;
  // A scale (2 bytes) and its low bits (1).
  using WeightScales = VaryingStrip<3>;
  using Tokens = PlainRows;
  using Weights = FromCodes<DecodeTable<ScalesOfSums>>;
  using Promote = PerStagesAndRow<1>;
  using Inner = RoundBf16;
};

}  // namespace moesaic::cuda
