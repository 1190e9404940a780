// The router of a layer from its plan, on the CPU: the layer's own, or for what explain says.
#pragma once

#include "layer/fused_plan.h"
#include "moesaic/router.h"

namespace moesaic::layer {

Result<Router> make_layer_router(const FusedPlan& plan, const FusedMoE::Options& options,
                                 const ConstTensorView& correction_bias,
                                 const ConstTensorView& expert_scale);

}  // namespace moesaic::layer
