// What the stages that round and multiply ask about a scheme's arithmetic.
#pragma once

#include <optional>

#include "moesaic/dtype.h"
#include "moesaic/quant.h"

namespace moesaic::quant {

// The dtype that hidden states and the activation's result are rounded to before a GEMM reads them
// (or before they are quantised): F32 in the F32 scheme, activation_dtype in all others.
inline DType operand_dtype(DType activation_dtype, ComputeScheme kind) {
  return kind == ComputeScheme::kF32 ? DType::kF32 : activation_dtype;
}
// Whether activations have scales that come with the weights, one per expert and projection.
inline bool has_static_scale(const OperandQuant& activation) {
  return activation.outer_scale == OuterScale::kTensor ||
         (activation.granularity == ScaleGranularity::kTensor && !activation.dynamic);
}
// The only activation_dtype that the arithmetic takes: BF16 or F16 where that is the operand;
// empty: any.
std::optional<DType> needed_activation_dtype(ComputeScheme kind);

}  // namespace moesaic::quant
