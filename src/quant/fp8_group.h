// FP8 (e4m3) activations with one scale per row and group of columns (128 in the block scheme), as
// plain loops: the oracle of the kernels' own quantisers.
#pragma once

#include <cstdint>

#include "quant/fp8_block.h"

namespace moesaic::quant {

// Smallest amax of a group, and in the power-of-two form the smallest scale too. A group of zeros
// gets the scale 1e-10/448 (bits 0x2A7B5123), or 2^-33.
inline constexpr float kFp8GroupEps = 1e-10F;

// The scale of a group with this amax: max(amax, 1e-10) / 448, or that, at least 1e-10, rounded up
// to a power of two.
float fp8_group_scale(float amax, ScaleRounding rounding);

// One row, with no checks; the last group may be shorter:
//   q[i] = e4m3(clamp(x[i] / s, +-448)),  scales[g] = s of group g.
// The quotient is a true fp32 division. A NaN element does not count in amax and gets the code of
// +448; an infinite one makes its group's scale infinite (plain form) or 2^127.
void ref_quantize_fp8_row(const float* x, std::int64_t k, std::int64_t group,
                          ScaleRounding rounding, std::uint8_t* q, float* scales);

}  // namespace moesaic::quant
