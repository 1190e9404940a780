#include "layer/layer_router.h"

namespace moesaic::layer {

Result<Router> make_layer_router(const FusedPlan& plan, const FusedMoE::Options& options,
                                 const ConstTensorView& correction_bias,
                                 const ConstTensorView& expert_scale) {
  Router::Options router;
  router.spec = plan.routing;
  router.correction_bias = correction_bias;
  router.expert_scale = expert_scale;
  router.custom = options.custom_routing;
  router.num_threads = options.num_threads;
  return Router::create(router);
}

}  // namespace moesaic::layer
