// e4m3 with F32 scales per block, row or matrix, bf16 activations: exact operands, as int4_bf16.h.
#pragma once

#include "experts/sm90/format_parts.h"

namespace moesaic::cuda {

struct Fp8Bf16 {
  using Product = ptx::BF16;
  static constexpr int kChunkK = 64, kWeightBits = 8;
  // A scale (2 bytes) and its low bits (1).
  using WeightScales = VaryingStrip<3>;
  using Tokens = PlainRows;
  using Weights = FromCodes<DecodeE4M3>;
  using Promote = PerStagesAndRow<2>;
  using Inner = RoundBf16;
};

}  // namespace moesaic::cuda
