#include "layer_origin.h"

#include "moesaic/fused_moe.h"
#include "moesaic/router.h"

namespace moesaic::tool {
namespace {

// What the values of the small tensors do to a router, which reads them when it is made.
Status check_router(const Checkpoint& checkpoint, int layer) {
  MOESAIC_ASSIGN_OR_RETURN(const MoeLayerWeights weights, checkpoint.load_layer(layer, {}));
  Router::Options router;
  router.spec = weights.spec.routing;
  router.correction_bias = weights.tensors.e_score_correction_bias.view();
  router.expert_scale = weights.tensors.expert_scale.view();
  router.hash_table = weights.tensors.hash_table.view();
  return Router::create(router).status();
}

}  // namespace

Origin layer_origin(const Status& status, const Checkpoint& checkpoint, int layer) {
  // Most codes say by themselves whose fault it is.
  if (exit_code(status.code(), Origin::kFile) == exit_code(status.code(), Origin::kOption)) {
    return Origin::kOption;
  }
  const Result<MoeLayerFormat> format = checkpoint.check_layer(layer);
  if (!format.ok()) return Origin::kFile;
  for (const Status& without_options :
       {explain_layer(*format, {}).status(), check_router(checkpoint, layer)}) {
    if (without_options.code() == status.code()) return Origin::kFile;
  }
  return Origin::kOption;
}

}  // namespace moesaic::tool
