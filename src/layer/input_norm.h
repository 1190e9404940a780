// RMS normalisation of a layer's rows on their way to the router and the routed experts (Gemma 4).
#pragma once

#include "moesaic/tensor.h"

namespace moesaic::layer {

// out[t, h] = x[t, h] / sqrt(mean over h of x[t, h]^2 + eps), times weight[h] where there is one.
//   x       [M, H] F32, BF16 or F16, rows may be apart
//   weight  [H] F32, or null: 1
//   out     [M, H] F32, contiguous, must not alias x
// The mean is a double; each element is within 4 * 2^-24 of exact, relatively. NaN stays in its
// row. Checks nothing, allocates nothing.
void normalise_rows(const ConstTensorView& x, double eps, const float* weight, float* out);

}  // namespace moesaic::layer
