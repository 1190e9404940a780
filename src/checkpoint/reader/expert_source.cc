#include "checkpoint/reader/expert_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoint/reader/linear_numbers.h"
#include "checkpoint/reader/mlp_buffers.h"
#include "checkpoint/reader/mlp_reader.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// The experts of one source: which they are, and how they are stored.
struct SourcePart {
  std::vector<MlpTensors> tensors;  // of each expert, or of all together
  std::vector<std::int64_t> ids;    // of the local experts
  std::string where;                // begins every message
  bool numbered = true;             // the expert's id stands behind it
  MlpSlice slice;
  InputScaleRule input_scales = InputScaleRule::kPerExpert;
};

// One expert at a time into buffers of its own, whatever the format.
class CheckpointExpertSource final : public ExpertSource {
 public:
  CheckpointExpertSource(std::shared_ptr<const ShardSet> shards, SourcePart part,
                         MlpBuffers buffers, MlpBuffers unpadded, LoadProgress progress)
      : shards_(std::move(shards)),
        part_(std::move(part)),
        buffers_(std::move(buffers)),
        unpadded_(std::move(unpadded)),
        progress_(std::move(progress)) {}

  Result<ExpertWeightsView> expert(std::int64_t local_expert) override {
    const auto count = static_cast<std::int64_t>(part_.ids.size());
    if (local_expert < 0 || local_expert >= count) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("local_expert: got {}, need a value in [0, {})", local_expert, count));
    }
    std::int64_t id = part_.ids[static_cast<std::size_t>(local_expert)];
    if (MOESAIC_FAULT(checkpoint_local_id_as_global)) id = local_expert;
    const Status status = read(id);
    if (!status.ok()) {
      return status.with_context(part_.numbered ? fmt::format("{} {}", part_.where, id)
                                                : part_.where);
    }
    progress_.add(buffers_.bytes());
    return view_of(buffers_);
  }

 private:
  Status read(std::int64_t id) {
    const MlpTensors& tensors = part_.tensors.size() == 1
                                    ? part_.tensors.front()
                                    : part_.tensors[static_cast<std::size_t>(id)];
    // Values are read with the first expert, not when the layer is bound.
    if (!input_scales_) {
      MOESAIC_ASSIGN_OR_RETURN(
          input_scales_, read_input_scales(part_.tensors, part_.slice.format, part_.slice.experts,
                                           part_.input_scales));
    }
    const MlpSlice& slice = part_.slice;
    if (slice.padded == slice.count) return read_into(tensors, id, &buffers_);
    if (slice.count > 0) MOESAIC_RETURN_IF_ERROR(read_into(tensors, id, &unpadded_));
    pad_mlp(unpadded_, slice, &buffers_);
    set_input_scales(*input_scales_, id, &buffers_);
    return {};
  }

  Status read_into(const MlpTensors& tensors, std::int64_t id, MlpBuffers* to) {
    const bool wide = part_.slice.format.stored != StoredFormat::kPlain &&
                      part_.slice.scheme.weight.granularity == ScaleGranularity::kNone;
    return wide ? read_wide_mlp(tensors, part_.slice, id, to)
                : read_mlp(tensors, part_.slice, *input_scales_, id, to);
  }

  std::shared_ptr<const ShardSet> shards_;  // keeps the files of part_ open
  SourcePart part_;
  MlpBuffers buffers_;
  MlpBuffers unpadded_;  // where this rank has less than the others, or nothing
  std::optional<InputScales> input_scales_;
  LoadProgress progress_;
};

Result<std::unique_ptr<ExpertSource>> make_source(std::shared_ptr<const ShardSet> shards,
                                                  SourcePart part, LoadProgress progress) {
  MlpSlice slice = part.slice;
  slice.count = slice.padded;
  MOESAIC_ASSIGN_OR_RETURN(MlpBuffers buffers, MlpBuffers::make(slice));
  MlpBuffers unpadded;
  if (part.slice.count > 0 && part.slice.count < part.slice.padded) {
    MOESAIC_ASSIGN_OR_RETURN(unpadded, MlpBuffers::make(part.slice));
  }
  return std::unique_ptr<ExpertSource>(std::make_unique<CheckpointExpertSource>(
      std::move(shards), std::move(part), std::move(buffers), std::move(unpadded),
      std::move(progress)));
}

}  // namespace

void LoadProgress::add(std::int64_t bytes) {
  done_bytes_ = std::min(done_bytes_ + bytes, total_bytes_);
  if (report_) report_(done_bytes_, total_bytes_);
}

Result<quant::WidthSlice> width_slice(const LayerSource& source, const ParallelConfig& parallel) {
  return quant::slice_width("intermediate_size", source.spec.intermediate_size, parallel.tp_size,
                            parallel.tp_rank, slice_unit(source.experts),
                            quant::is_cut_unevenly(source.spec.quant));
}

Result<MlpSlice> expert_slice(const LayerSource& source, const ParallelConfig& parallel) {
  MOESAIC_ASSIGN_OR_RETURN(const quant::WidthSlice width, width_slice(source, parallel));
  MlpSlice slice;
  slice.format = source.experts;
  slice.scheme = source.spec.quant;
  slice.storage = source.layout->storage;
  slice.experts = source.spec.num_experts;
  slice.scales_stacked = source.scales_stacked;
  slice.gated = !source.layout->gate.empty();
  slice.hidden = source.spec.hidden_size;
  slice.width = source.spec.intermediate_size;
  slice.first = width.first;
  slice.count = width.count;
  slice.padded = width.padded;
  slice.has_bias = source.spec.has_expert_bias;
  slice.with_down_bias = parallel.tp_rank == 0;
  return slice;
}

std::int64_t local_expert_bytes(const BoundLayer& layer, int tp_size,
                                std::int64_t num_local_experts) {
  std::int64_t bytes = 0;
  for (const MlpTensors& expert : layer.experts) bytes += expert.bytes();
  if (layer.source.scales_stacked) {  // counted with every expert, and for gate and up
    const auto& scale = layer.experts.front().of(TensorKind::kScale);
    for (const std::size_t p : {kW1, kW2}) {
      const auto one = static_cast<std::int64_t>(scale[p]->info->bytes());
      bytes -= one * (layer.source.spec.num_experts * (p == kW1 ? 2 : 1) - 1);
    }
  }
  return bytes / layer.source.spec.num_experts / tp_size * num_local_experts;
}

Result<std::unique_ptr<ExpertSource>> make_checkpoint_source(
    std::shared_ptr<const ShardSet> shards, BoundLayer layer, const ParallelConfig& parallel,
    std::vector<std::int64_t> expert_ids, std::string directory, LoadProgress progress,
    InputScaleRule input_scales) {
  const LayerSource& source = layer.source;
  SourcePart part;
  part.tensors = std::move(layer.experts);
  part.ids = std::move(expert_ids);
  part.input_scales = input_scales;
  part.where = fmt::format("{}: layer {} expert", directory, source.spec.layer);
  MOESAIC_ASSIGN_OR_RETURN(part.slice, expert_slice(source, parallel));
  return make_source(std::move(shards), std::move(part), std::move(progress));
}

Result<quant::WidthSlice> shared_slice(const LayerSource& source, const ParallelConfig& parallel,
                                       bool cut) {
  const quant::RowSharing same = cut ? quant::row_sharing(parallel) : quant::RowSharing{};
  return quant::slice_width("shared.intermediate_size", source.spec.shared.intermediate_size,
                            same.ranks, same.rank, slice_unit(source.shared),
                            same.ranks > 1 && quant::is_cut_unevenly(source.shared_quant));
}

Result<std::unique_ptr<ExpertSource>> make_shared_source(std::shared_ptr<const ShardSet> shards,
                                                         const BoundLayer& layer,
                                                         const ParallelConfig& parallel, bool cut,
                                                         std::string directory) {
  const LayerSource& source = layer.source;
  SourcePart part;
  part.tensors = {layer.shared};
  part.ids = {0};
  part.where = fmt::format("{}: layer {} shared expert", directory, source.spec.layer);
  part.numbered = false;
  part.slice.format = source.shared;
  part.slice.scheme = source.shared_quant;
  part.slice.storage = source.shared_layout->storage;
  part.slice.gated = !source.shared_layout->gate.empty();
  part.slice.hidden = source.spec.hidden_size;
  MOESAIC_ASSIGN_OR_RETURN(const quant::WidthSlice width, shared_slice(source, parallel, cut));
  part.slice.width = source.spec.shared.intermediate_size;
  part.slice.first = width.first;
  part.slice.count = width.count;
  part.slice.padded = width.padded;
  return make_source(std::move(shards), std::move(part), LoadProgress({}, 0));
}

}  // namespace moesaic::checkpoint
