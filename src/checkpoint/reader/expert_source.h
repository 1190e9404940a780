// The experts of one layer, read from the checkpoint one at a time into one staging buffer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/container/shards.h"
#include "checkpoint/reader/window.h"
#include "moesaic/checkpoint.h"
#include "moesaic/experts.h"
#include "moesaic/parallel.h"
#include "moesaic/status.h"
#include "quant/width_slice.h"

namespace moesaic::checkpoint {

// Counts bytes for a ProgressFn; shared by the loads of one layer.
class LoadProgress {
 public:
  LoadProgress(ProgressFn report, std::int64_t total_bytes)
      : report_(std::move(report)), total_bytes_(total_bytes) {}
  // Never reports more than the total, however often an expert is read.
  void add(std::int64_t bytes);

 private:
  ProgressFn report_;
  std::int64_t total_bytes_;
  std::int64_t done_bytes_ = 0;
};

// The part of every expert's width that this rank reads, cut where the stored format may be cut.
// Errors of quant::slice_width, about intermediate_size.
Result<quant::WidthSlice> width_slice(const LayerSource& source, const ParallelConfig& parallel);

// What this rank reads of every expert. Errors of width_slice.
Result<MlpSlice> expert_slice(const LayerSource& source, const ParallelConfig& parallel);

// Keeps the files open. `layer` was bound to `shards`; its slice was checked with width_slice;
// `expert_ids` are the global ids of this rank's experts, in local order (copies of one: twice); `directory` begins the
// source's messages.
// Memory: the canonical weights of one expert (plus one projection for transposed storages, and the
// expert a second time where this rank has less than the others).
Result<std::unique_ptr<ExpertSource>> make_checkpoint_source(
    std::shared_ptr<const ShardSet> shards, BoundLayer layer, const ParallelConfig& parallel,
    std::vector<std::int64_t> expert_ids, std::string directory, LoadProgress progress,
    InputScaleRule input_scales = InputScaleRule::kPerExpert);

// The part of the shared expert's width that this rank reads: all of it, or with `cut` that of one of
// the ranks with the same rows. Its scheme is known. Errors of quant::slice_width.
Result<quant::WidthSlice> shared_slice(const LayerSource& source, const ParallelConfig& parallel,
                                       bool cut);

// The shared expert, or that slice of it: expert 0 of its source, as `layer.source.shared_quant` says.
Result<std::unique_ptr<ExpertSource>> make_shared_source(std::shared_ptr<const ShardSet> shards,
                                                         const BoundLayer& layer,
                                                         const ParallelConfig& parallel, bool cut,
                                                         std::string directory);

// Bytes that the routed experts' source will read for a rank with so many experts.
std::int64_t local_expert_bytes(const BoundLayer& layer, int tp_size,
                                std::int64_t num_local_experts);

}  // namespace moesaic::checkpoint
