// From a set of tensors to a layer's weights: what a file's layer and one whose tensors were handed
// over have in common, which is everything behind the container.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/config.h"
#include "checkpoint/container/shards.h"
#include "moesaic/checkpoint.h"
#include "moesaic/parallel.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// bind_layer with everything else that can be refused before weights are read: sizes that do not
// divide, the scheme that the numbers mean, and static activation scales. Errors of all.
Result<BoundLayer> check_bound_layer(const ModelConfig& config, const MoeLayerSpec& spec,
                                     const ShardSet& shards, const ParallelConfig& parallel,
                                     InputScaleRule input_scales, const TensorNeeded& needed = {},
                                     bool cut_shared = false);

// kCorruptFile: a table of token ids that names an expert that does not exist. No table is fine.
Status check_hash_table(const BoundLayer& layer);

// Reads the router's tensors and makes the experts' sources; `layer` is check_bound_layer's for
// these shards, this `parallel` and `cut_shared`.
//   expert_ids  the logical expert in each local slot; an id may come twice
//   label       begins the sources' messages
Result<MoeLayerWeights> make_layer_weights(std::shared_ptr<const ShardSet> shards, BoundLayer layer,
                                           const ParallelConfig& parallel,
                                           std::vector<std::int64_t> expert_ids,
                                           InputScaleRule input_scales, const std::string& label,
                                           const ProgressFn& progress, bool cut_shared = false);

}  // namespace moesaic::checkpoint
