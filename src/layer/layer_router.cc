#include "layer/layer_router.h"

namespace moesaic::layer {

Router::Options layer_router_options(const FusedPlan& plan, const MoeLayerTensors& tensors) {
  Router::Options router;
  router.spec = plan.routing;
  router.correction_bias = tensors.e_score_correction_bias.view();
  router.expert_scale = tensors.expert_scale.view();
  router.hash_table = tensors.hash_table.view();
  return router;
}

Result<Router> make_layer_router(const FusedPlan& plan, const FusedMoE::Options& options,
                                 const MoeLayerTensors& tensors) {
  Router::Options router = layer_router_options(plan, tensors);
  router.custom = options.custom_routing;
  router.num_threads = options.num_threads;
  return Router::create(router);
}

}  // namespace moesaic::layer
