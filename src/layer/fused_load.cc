// A FusedMoE of a checkpoint: what only a layer that reads its weights itself can decide.
#include <utility>

#include "core/fault.h"
#include "core/guarded.h"
#include "layer/fused_impl.h"
#include "moesaic/interop/parallel.h"

namespace moesaic {
namespace {

// The options with the placement that is in force: this layer may still cut its weights either way.
Result<FusedMoE::Options> with_placement(const MoeLayerSpec& spec, FusedMoE::Options options) {
  PlacementFacts facts;
  facts.num_expert_group = static_cast<int>(spec.routing.num_expert_group);
  facts.enable_eplb = options.ranks.enable_eplb;
  facts.num_redundant_experts = options.ranks.num_redundant_experts;
  facts.all_to_all = options.parallel.use_all_to_all();
  facts.takes_routing_tables = true;  // all transports here take any owner of any expert
  if (MOESAIC_FAULT(layer_placement_as_asked)) return options;
  MOESAIC_ASSIGN_OR_RETURN(options.parallel.placement,
                           resolve_placement(options.parallel.placement,
                                             spec.num_experts + options.ranks.num_redundant_experts,
                                             options.parallel.ep_size, facts));
  return options;
}

Result<MoeLayerWeights> load(const Checkpoint& checkpoint, int layer,
                             const FusedMoE::Options& options) {
  // Experts that move may become any rank's.
  return checkpoint.load_layer(layer,
                               options.ranks.enable_eplb ? ParallelConfig() : options.parallel,
                               options.progress, options.include_gate, options.ranks.cut_shared);
}

}  // namespace

Result<FusedMoE> FusedMoE::from_checkpoint(const Checkpoint& checkpoint, int layer,
                                           const Options& options) {
  Options settled = options;
  Result<MoeLayerWeights> weights = without_exceptions("layer", [&]() -> Result<MoeLayerWeights> {
    MOESAIC_ASSIGN_OR_RETURN(const MoeLayerSpec spec, checkpoint.layer(layer));
    MOESAIC_ASSIGN_OR_RETURN(settled, with_placement(spec, options));
    return load(checkpoint, layer, settled);
  });
  if (weights.ok()) return create(std::move(weights).value(), settled);
  // The other ranks wait in create.
  return Impl::agree(options.ranks.communicator.get(), weights.status());
}

}  // namespace moesaic
