#include "checkpoint/reader/expert_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoint/binding/layer_plan.h"
#include "checkpoint/reader/mlp_reader.h"
#include "checkpoint/reader/quantized_reader.h"
#include "core/fault.h"

namespace moesaic {
namespace {

MlpSlice expert_slice(const LayerSource& source, const ParallelConfig& parallel) {
  MlpSlice slice;
  slice.storage = source.layout->storage;
  slice.gated = !source.layout->gate.empty();
  slice.format = source.experts.stored;
  slice.dtype = source.experts_dtype;
  slice.hidden = source.spec.hidden_size;
  slice.width = source.spec.intermediate_size;
  slice.count = slice.width / parallel.tp_size;
  slice.first = slice.count * parallel.tp_rank;
  slice.scales_stacked = source.scales_stacked;
  slice.has_bias = source.spec.has_expert_bias;
  slice.with_down_bias = parallel.tp_rank == 0;
  return slice;
}

QuantizedSlice quantized_slice(const LayerSource& source, const ParallelConfig& parallel) {
  QuantizedSlice slice;
  slice.format = source.experts;
  slice.scheme = source.spec.quant;
  slice.storage = source.layout->storage;
  slice.scales_stacked = source.scales_stacked;
  slice.experts = source.spec.num_experts;
  slice.gated = !source.layout->gate.empty();
  slice.hidden = source.spec.hidden_size;
  slice.width = source.spec.intermediate_size;
  slice.count = slice.width / parallel.tp_size;
  slice.first = slice.count * parallel.tp_rank;
  return slice;
}

std::int64_t expert_bytes(const MlpBuffers& b) {
  return b.w13.bytes() + b.w2.bytes() + b.w13_scale.bytes() + b.w2_scale.bytes() +
         b.w13_bias.bytes() + b.w2_bias.bytes();
}

// One expert at a time, whatever the format: `Reader` owns the buffers.
template <class Reader>
class CheckpointExpertSource : public ExpertSource {
 public:
  CheckpointExpertSource(std::shared_ptr<const ShardSet> shards, BoundLayer layer, Reader reader,
                         std::vector<std::int64_t> ids, std::string directory,
                         LoadProgress progress)
      : shards_(std::move(shards)),
        layer_(std::move(layer)),
        reader_(std::move(reader)),
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
    const MlpTensors& tensors = layer_.experts.size() == 1
                                    ? layer_.experts.front()
                                    : layer_.experts[static_cast<std::size_t>(id)];
    Status read = reader_.prepare(layer_.experts);
    if (read.ok()) read = reader_.read(tensors, id);
    if (!read.ok()) {
      return read.with_context(
          fmt::format("{}: layer {} expert {}", directory_, layer_.source.spec.layer, id));
    }
    progress_.add(reader_.bytes());
    return reader_.view();
  }

 private:
  std::shared_ptr<const ShardSet> shards_;  // keeps the files of layer_ open
  BoundLayer layer_;
  Reader reader_;
  std::vector<std::int64_t> global_ids_;
  std::string directory_;  // begins every message
  LoadProgress progress_;
};

// Storages of reader/mlp_reader.h.
struct PlainReader {
  MlpSlice slice;
  MlpBuffers buffers;
  Status prepare(const std::vector<MlpTensors>&) { return {}; }
  Status read(const MlpTensors& tensors, std::int64_t expert) {
    return read_mlp(tensors, slice, expert, &buffers);
  }
  std::int64_t bytes() const { return expert_bytes(buffers); }
  ExpertWeightsView view() const {
    const MlpBuffers& b = buffers;
    ExpertWeightsView view;
    view.w13 = b.w13.view();
    view.w2 = b.w2.view();
    if (b.w13_scale.present()) view.w13_scale = b.w13_scale.view();
    if (b.w2_scale.present()) view.w2_scale = b.w2_scale.view();
    if (b.w13_bias.present()) view.w13_bias = b.w13_bias.view();
    if (b.w2_bias.present()) view.w2_bias = b.w2_bias.view();
    return view;
  }
};

// Formats of reader/quantized_reader.h.
struct FormatReader {
  QuantizedSlice slice;
  QuantizedBuffers buffers;
  MlpSlice biases;
  MlpBuffers bias_buffers;
  std::optional<InputScales> input_scales;
  Tensor wide_w13, wide_w2;  // in place of `buffers` for layers that are F32 once loaded
  // Values are read with the first expert, not when the layer is bound.
  Status prepare(const std::vector<MlpTensors>& experts) {
    if (input_scales) return {};
    MOESAIC_ASSIGN_OR_RETURN(input_scales, read_input_scales(experts, slice.format));
    return {};
  }
  Status read(const MlpTensors& tensors, std::int64_t expert) {
    MOESAIC_RETURN_IF_ERROR(
        wide_w13.present() ? read_wide_mlp(tensors, slice, expert, &wide_w13, &wide_w2)
                           : read_quantized_mlp(tensors, slice, *input_scales, expert, &buffers));
    if (!biases.has_bias) return {};
    return read_mlp_biases(tensors, biases, expert, &bias_buffers);
  }
  std::int64_t bytes() const {
    return buffers.bytes() + wide_w13.bytes() + wide_w2.bytes() + expert_bytes(bias_buffers);
  }
  ExpertWeightsView view() const {
    ExpertWeightsView view = view_of(buffers);
    if (wide_w13.present()) {
      view.w13 = wide_w13.view();
      view.w2 = wide_w2.view();
    }
    if (biases.has_bias) {
      view.w13_bias = bias_buffers.w13_bias.view();
      view.w2_bias = bias_buffers.w2_bias.view();
    }
    return view;
  }
};

}  // namespace

void LoadProgress::add(std::int64_t bytes) {
  done_bytes_ = std::min(done_bytes_ + bytes, total_bytes_);
  if (report_) report_(done_bytes_, total_bytes_);
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
    std::vector<std::int64_t> expert_ids, std::string directory, LoadProgress progress) {
  const auto make = [&](auto reader) {
    return std::unique_ptr<ExpertSource>(std::make_unique<CheckpointExpertSource<decltype(reader)>>(
        std::move(shards), std::move(layer), std::move(reader), std::move(expert_ids),
        std::move(directory), std::move(progress)));
  };
  if (!is_quantized_linear(layer.source.experts.stored)) {
    PlainReader reader{expert_slice(layer.source, parallel), {}};
    MOESAIC_ASSIGN_OR_RETURN(reader.buffers, MlpBuffers::make(reader.slice));
    return make(std::move(reader));
  }
  FormatReader reader{quantized_slice(layer.source, parallel), {}, {}, {}, std::nullopt, {}, {}};
  if (layer.source.spec.has_expert_bias) {
    // Biases are not quantised; their place in the files is that of the plain storage.
    reader.biases = expert_slice(layer.source, parallel);
    MOESAIC_RETURN_IF_ERROR(reader.bias_buffers.make_biases(reader.biases));
  }
  QuantizedSlice& slice = reader.slice;
  if (slice.scheme.weight.granularity == ScaleGranularity::kNone) {
    MOESAIC_ASSIGN_OR_RETURN(slice.scheme, linear_scheme(slice.format, DType::kF32));
    const std::int64_t rows = (slice.gated ? 2 : 1) * slice.count;
    MOESAIC_ASSIGN_OR_RETURN(reader.wide_w13,
                             Tensor::uninitialized(DType::kF32, {rows, slice.hidden}));
    MOESAIC_ASSIGN_OR_RETURN(reader.wide_w2,
                             Tensor::uninitialized(DType::kF32, {slice.hidden, slice.count}));
  } else {
    MOESAIC_ASSIGN_OR_RETURN(reader.buffers, QuantizedBuffers::make(slice));
  }
  return make(std::move(reader));
}

}  // namespace moesaic
