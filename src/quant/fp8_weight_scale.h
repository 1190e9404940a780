// The scale of FP8 (e4m3) weights: of a row, a tile, or a row of group scales.
#pragma once

#include <algorithm>
#include <limits>

#include "numerics/codec.h"

namespace moesaic::quant {

// amax / 448, at least the published floor, which is the scale of zeros too. Below it not even the
// largest weight would have a code of 1, and the others ever fewer bits: there amax / 448, at least
// the smallest normal fp32 number.
inline float fp8_weight_scale(float amax, float floor) {
  const bool small = amax > 0.0F && amax < floor;
  return std::max(amax / kE4m3Max, small ? std::numeric_limits<float>::min() : floor);
}

}  // namespace moesaic::quant
