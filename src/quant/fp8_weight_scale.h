// The scale of FP8 (e4m3) weights: of a row, a tile, or a row of group scales.
#pragma once

#include <algorithm>
#include <limits>

#include "numerics/codec.h"

namespace moesaic::quant {

// amax / 448, at least the smallest normal fp32 number; scale_of_zeros where all are 0. No other
// floor, as activations have (fp8_scaled.h): it would take bits of small weights.
inline float fp8_weight_scale(float amax, float scale_of_zeros) {
  if (!(amax > 0.0F)) return scale_of_zeros;
  return std::max(amax / kE4m3Max, std::numeric_limits<float>::min());
}

}  // namespace moesaic::quant
