// The router of a layer from its plan, on the CPU.
#pragma once

#include "layer/fused_plan.h"
#include "moesaic/checkpoint.h"
#include "moesaic/router.h"

namespace moesaic::layer {

// Its options; the views must outlive Router::create.
Router::Options layer_router_options(const FusedPlan& plan, const MoeLayerTensors& tensors);
Result<Router> make_layer_router(const FusedPlan& plan, const FusedMoE::Options& options,
                                 const MoeLayerTensors& tensors);

}  // namespace moesaic::layer
