// What a FusedMoE holds: what does not depend on its engine.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "layer/engine.h"
#include "layer/fused_plan.h"
#include "layer/rank_mesh.h"
#include "moesaic/fused_moe.h"

namespace moesaic {

struct FusedMoE::Impl {
  MoeLayerSpec spec;
  Scheme shared_stored;  // how the shared expert is stored
  layer::FusedPlan plan;
  Options options;
  std::string router_name;
  std::unique_ptr<layer::RankMesh> mesh;  // null: this layer does not communicate
  std::unique_ptr<layer::LayerEngine> engine;
  mutable std::mutex mutex;  // one call at a time uses the engine's workspace

  static Result<std::unique_ptr<Impl>> build(MoeLayerWeights weights, const Options& options);
  // What all ranks must have in common.
  std::vector<layer::Fact> facts() const;
  // Whether the layers that all ranks of `world` (null: this one alone) have made go together. On this
  // one it may have failed.
  static Status agree(Communicator* world, const Result<std::unique_ptr<Impl>>& made);
  // Everything of update_expert_map but the agreement with the other ranks: what this layer would be
  // in that world. Leaves this one as it is.
  Result<std::unique_ptr<Impl>> in_world(const World& world, ExpertSource& experts) const;
  // A call on host tensors, as matrices.
  Status check(const Args& args) const;
  template <class Step>
  Status step_of_call(std::string_view what, Step&& step) const;
  Status check_shared_output(const Args& args, std::int64_t input_bytes,
                             std::int64_t output_bytes) const;
};

}  // namespace moesaic
