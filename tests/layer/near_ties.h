// Layers whose choice of experts depends on how logits are rounded.
#pragma once

#include "gate/rounding.h"
#include "layer/layer_case.h"

namespace moesaic::test {

// small_spec with one expert per token. Gate rows come in pairs that differ in the last bit of one
// bf16 element: fp32 logits tell them apart, most rounded ones do not, and ties go to the even id.
LayerTensors near_ties(DType gate_dtype, const MoeLayerSpec& like = small_spec());

// F32 logits after the roundings.
Tensor rounded_logits(const Tensor& logits, const gate::LogitRounding& rounding);

}  // namespace moesaic::test
