// Reference gate: plain loops in float64, no SIMD, no threads. The oracle of the fast kernel.
#pragma once

#include "moesaic/tensor.h"

namespace moesaic::gate {

// logits[t * E + e] = sum_i x[t, i] * weight[e, i] (+ bias[e]), and magnitude[t * E + e] = the same
// sum of absolute values, both in float64: an error bound is a multiple of the magnitude.
//   x [M, H] rows may be strided, weight [E, H] contiguous, bias [E] or absent; F32, BF16 or F16
// The caller has checked shapes and dtypes. `magnitude` may be null.
void ref_gate_logits(const ConstTensorView& x, const ConstTensorView& weight,
                     const ConstTensorView& bias, double* logits, double* magnitude);

}  // namespace moesaic::gate
