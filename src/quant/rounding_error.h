// How much rounding to a format costs, as bounds need it: figures of normal data, and what becomes
// of an error of the weights on the way through an expert. Source: docs/spec/quantization.md
// section 15; docs/accuracy.md has the measurements.
#pragma once

#include "moesaic/quant.h"

namespace moesaic {

// Relative RMS error of an operand's format on normal data; per-tensor and per-row scales count as
// the finer ones do, which holds where rows differ by less than the format's range.
double rounding_error(const OperandQuant& q);

// Another sample than the one measured.
inline constexpr double kRoundingMargin = 1.15;
// Gate, up and down each add the weights' relative error to the output's: sqrt(3) times it in
// quadrature, with a margin of a third.
inline constexpr double kWeightErrorGain = 2.31;

}  // namespace moesaic
