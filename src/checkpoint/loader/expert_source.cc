#include "checkpoint/loader/expert_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/layer_plan.h"
#include "checkpoint/loader/mlp_reader.h"
#include "core/fault.h"

namespace moesaic {
namespace {

MlpSlice expert_slice(const LayerSource& source, const ParallelConfig& parallel) {
  MlpSlice slice;
  slice.storage = source.layout->storage;
  slice.gated = !source.layout->gate.empty();
  slice.format = source.experts_format;
  slice.dtype = source.experts_dtype;
  slice.hidden = source.spec.hidden_size;
  slice.width = source.spec.intermediate_size;
  slice.count = slice.width / parallel.tp_size;
  slice.first = slice.count * parallel.tp_rank;
  slice.has_bias = source.spec.has_expert_bias;
  slice.with_down_bias = parallel.tp_rank == 0;
  return slice;
}

std::int64_t expert_bytes(const MlpBuffers& b) {
  return b.w13.bytes() + b.w2.bytes() + b.w13_scale.bytes() + b.w2_scale.bytes() +
         b.w13_bias.bytes() + b.w2_bias.bytes();
}

class CheckpointExpertSource : public ExpertSource {
 public:
  CheckpointExpertSource(std::shared_ptr<const ShardSet> shards, BoundLayer layer,
                         const MlpSlice& slice, MlpBuffers buffers, std::vector<std::int64_t> ids,
                         std::string directory, LoadProgress progress)
      : shards_(std::move(shards)),
        layer_(std::move(layer)),
        slice_(slice),
        buffers_(std::move(buffers)),
        global_ids_(std::move(ids)),
        directory_(std::move(directory)),
        progress_(std::move(progress)) {}

  Result<ExpertWeightsView> expert(std::int64_t local_expert) override {
    const auto count = static_cast<std::int64_t>(global_ids_.size());
    if (local_expert < 0 || local_expert >= count) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("local_expert: got {}, need a value in [0, {})", local_expert, count));
    }
    std::int64_t id = global_ids_[static_cast<std::size_t>(local_expert)];
    if (MOESAIC_FAULT(checkpoint_local_id_as_global)) id = local_expert;
    const bool stacked = slice_.storage != ExpertStorage::kPerExpert;
    const MlpTensors& tensors = layer_.experts[stacked ? 0 : static_cast<std::size_t>(id)];
    const Status read = read_mlp(tensors, slice_, id, &buffers_);
    if (!read.ok()) {
      return read.with_context(
          fmt::format("{}: layer {} expert {}", directory_, layer_.source.spec.layer, id));
    }
    progress_.add(expert_bytes(buffers_));
    const MlpBuffers& b = buffers_;
    ExpertWeightsView view;
    view.w13 = b.w13.view();
    view.w2 = b.w2.view();
    if (b.w13_scale.present()) view.w13_scale = b.w13_scale.view();
    if (b.w2_scale.present()) view.w2_scale = b.w2_scale.view();
    if (b.w13_bias.present()) view.w13_bias = b.w13_bias.view();
    if (b.w2_bias.present()) view.w2_bias = b.w2_bias.view();
    return view;
  }

 private:
  std::shared_ptr<const ShardSet> shards_;  // keeps the files of layer_ open
  BoundLayer layer_;
  MlpSlice slice_;
  MlpBuffers buffers_;
  std::vector<std::int64_t> global_ids_;
  std::string directory_;  // begins every message
  LoadProgress progress_;
};

}  // namespace

void LoadProgress::add(std::int64_t bytes) {
  done_bytes_ = std::min(done_bytes_ + bytes, total_bytes_);
  if (report_) report_(done_bytes_, total_bytes_);
}

std::int64_t local_expert_bytes(const BoundLayer& layer, int tp_size,
                                std::int64_t num_local_experts) {
  // Sizes were checked against the files, so that the sum of all tensors fits.
  std::int64_t bytes = 0;
  for (const MlpTensors& expert : layer.experts) {
    for (const auto* list : {&expert.weight, &expert.scale, &expert.bias}) {
      for (const auto& tensor : *list) {
        if (tensor) bytes += static_cast<std::int64_t>(tensor->info->bytes());
      }
    }
  }
  return bytes / layer.source.spec.num_experts / tp_size * num_local_experts;
}

Result<std::unique_ptr<ExpertSource>> make_checkpoint_source(
    std::shared_ptr<const ShardSet> shards, BoundLayer layer, const ParallelConfig& parallel,
    std::vector<std::int64_t> expert_ids, std::string directory, LoadProgress progress) {
  const MlpSlice slice = expert_slice(layer.source, parallel);
  MOESAIC_ASSIGN_OR_RETURN(MlpBuffers buffers, MlpBuffers::make(slice));
  return std::unique_ptr<ExpertSource>(std::make_unique<CheckpointExpertSource>(
      std::move(shards), std::move(layer), slice, std::move(buffers), std::move(expert_ids),
      std::move(directory), std::move(progress)));
}

}  // namespace moesaic
