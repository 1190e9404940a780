// What the tests of the GEMM kernels hand over to be filled.
#pragma once

#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "moesaic/tensor.h"
#include "support/random.h"

namespace moesaic::cpu {

// Poisoned: rows beyond the call's stay as they were.
inline Tensor poisoned_result() {
  Tensor t = Tensor::uninitialized(DType::kF32, {kMaxRows, kPanelColumns}).value();
  test::poison(t.view());
  return t;
}

}  // namespace moesaic::cpu
