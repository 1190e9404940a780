// RMS normalisation of a layer's rows on their way to the router and the routed experts (Gemma 4).
#pragma once

#include "cpu/kernels.h"
#include "moesaic/tensor.h"

namespace moesaic::layer {

// out[t, h] = x[t, h] / sqrt(mean over h of x[t, h]^2 + eps), times weight[h] where there is one.
//   x       [M, H] F32, BF16 or F16, rows may be apart
//   weight  [H] F32, or null: 1
//   out     [M, H] F32, contiguous, must not alias x
// The mean is a double, its order fixed; each element is within 4 * 2^-24 of exact, relatively. NaN
// stays in its row. The bits do not depend on the threads, of which there are num_threads at most.
// Checks nothing, allocates nothing.
void normalise_rows(const cpu::CpuKernels& kernels, const ConstTensorView& x, double eps,
                    const float* weight, float* out, int num_threads);

}  // namespace moesaic::layer
