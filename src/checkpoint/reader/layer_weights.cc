#include "checkpoint/reader/layer_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "checkpoint/container/names.h"
#include "checkpoint/reader/expert_source.h"
#include "checkpoint/reader/input_scales.h"
#include "checkpoint/reader/linear_numbers.h"
#include "checkpoint/reader/mlp_reader.h"
#include "core/fault.h"
#include "moesaic/log.h"
#include "quant/width_slice.h"

namespace moesaic::checkpoint {
namespace {

std::int64_t optional_bytes(const std::optional<ShardSet::Located>& tensor) {
  return tensor ? static_cast<std::int64_t>(tensor->info->bytes()) : 0;
}

// What is counted as loaded at once: the router, and the shared expert, which not every rank reads.
std::int64_t small_bytes(const BoundLayer& layer) {
  const std::int64_t bytes =
      optional_bytes(layer.gate_weight) + optional_bytes(layer.gate_bias) +
      optional_bytes(layer.correction_bias) + optional_bytes(layer.shared_gate) +
      optional_bytes(layer.hash_table) + optional_bytes(layer.router_scale) +
      optional_bytes(layer.experts_norm) + optional_bytes(layer.expert_scale);
  return bytes + layer.shared.bytes();
}

// Expert ids of every token, [vocabulary, k], as I32.
Status load_hash_table(const BoundLayer& layer, MoeLayerTensors* tensors) {
  if (!layer.hash_table) return {};
  const RoutingSpec& routing = layer.source.spec.routing;
  MOESAIC_ASSIGN_OR_RETURN(const Tensor stored,
                           layer.hash_table->file->read_tensor(*layer.hash_table->info));
  MOESAIC_ASSIGN_OR_RETURN(tensors->hash_table, Tensor::uninitialized(DType::kI32, stored.shape()));
  const std::int64_t count = stored.shape()[0] * stored.shape()[1];
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t id = stored.dtype() == DType::kI64
                                ? stored.as<std::int64_t>()[i]
                                : std::int64_t{stored.as<std::int32_t>()[i]};
    if (id < 0 || id >= routing.num_experts) {
      return {StatusCode::kCorruptFile,
              fmt::format("{}[{}, {}]: got expert {}, need 0 to {}",
                          quote_name(layer.hash_table->info->name), i / routing.top_k,
                          i % routing.top_k, id, routing.num_experts - 1)};
    }
    tensors->hash_table.as<std::int32_t>()[i] = static_cast<std::int32_t>(id);
  }
  return {};
}

// Scales of a router that sees normalised rows become part of its weight:
// W[e, h] * scale[h] / sqrt(H), rounded once to F32.
Status load_input_norm(const BoundLayer& layer, MoeLayerTensors* tensors) {
  const std::int64_t hidden = layer.source.spec.hidden_size;
  const std::int64_t experts = layer.source.spec.num_experts;
  if (layer.experts_norm && layer.expert_scale) {
    MOESAIC_ASSIGN_OR_RETURN(tensors->experts_norm_weight,
                             read_widened(*layer.experts_norm, {hidden}));
    MOESAIC_ASSIGN_OR_RETURN(tensors->expert_scale, read_widened(*layer.expert_scale, {experts}));
  }
  if (!layer.router_scale) return {};
  MOESAIC_ASSIGN_OR_RETURN(const Tensor scale, read_widened(*layer.router_scale, {hidden}));
  MOESAIC_ASSIGN_OR_RETURN(tensors->gate_weight,
                           read_widened(*layer.gate_weight, {experts, hidden}));
  const double root = std::sqrt(static_cast<double>(hidden));
  float* const weight = tensors->gate_weight.as<float>();
  for (std::int64_t i = 0; i < experts * hidden; ++i) {
    if (MOESAIC_FAULT(checkpoint_forget_router_scale)) break;
    weight[i] =
        static_cast<float>(double{weight[i]} * double{scale.as<float>()[i % hidden]} / root);
  }
  return {};
}

Result<MoeLayerTensors> load_tensors(const BoundLayer& layer) {
  const auto read_stored = [](const std::optional<ShardSet::Located>& from, Tensor* to) -> Status {
    if (!from) return {};
    MOESAIC_ASSIGN_OR_RETURN(*to, from->file->read_tensor(*from->info));
    return {};
  };
  MoeLayerTensors tensors;
  MOESAIC_RETURN_IF_ERROR(read_stored(layer.gate_weight, &tensors.gate_weight));
  MOESAIC_RETURN_IF_ERROR(read_stored(layer.gate_bias, &tensors.gate_bias));
  MOESAIC_RETURN_IF_ERROR(read_stored(layer.shared_gate, &tensors.shared_gate_weight));
  if (layer.shared_gate && tensors.shared_gate_weight.shape().rank() == 1) {  // [H] in GGUF
    const Tensor row = std::move(tensors.shared_gate_weight);
    MOESAIC_ASSIGN_OR_RETURN(tensors.shared_gate_weight,
                             Tensor::uninitialized(row.dtype(), {1, row.shape()[0]}));
    std::copy_n(row.data(), row.bytes(), tensors.shared_gate_weight.data());
  }
  if (layer.correction_bias) {
    MOESAIC_ASSIGN_OR_RETURN(
        tensors.e_score_correction_bias,
        read_widened(*layer.correction_bias,
                     {layer.source.spec.num_experts + layer.source.spec.routing.num_zero_experts}));
  }
  MOESAIC_RETURN_IF_ERROR(load_hash_table(layer, &tensors));
  MOESAIC_RETURN_IF_ERROR(load_input_norm(layer, &tensors));
  return tensors;
}

// Divisibility of what this rank gets, before any tensor is looked at.
Status check_parallel(const LayerSource& source, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(parallel.validate());
  return width_slice(source, parallel).status();
}

}  // namespace

Result<BoundLayer> check_bound_layer(const ModelConfig& config, const MoeLayerSpec& spec,
                                     const ShardSet& shards, const ParallelConfig& parallel,
                                     InputScaleRule input_scales, const TensorNeeded& needed,
                                     bool cut_shared) {
  MOESAIC_ASSIGN_OR_RETURN(BoundLayer layer, bind_layer(config, spec, shards, needed));
  MOESAIC_RETURN_IF_ERROR(check_parallel(layer.source, parallel));
  MOESAIC_RETURN_IF_ERROR(
      scheme_of_values(layer.experts, layer.source.experts, &layer.source.spec.quant));
  MOESAIC_RETURN_IF_ERROR(note_input_scales(input_scales, &layer));
  if (!layer.source.has_shared()) {
    layer.source.shared_quant = layer.source.spec.quant;
    return layer;
  }
  MOESAIC_ASSIGN_OR_RETURN(layer.source.shared_quant,
                           linear_scheme(layer.source.shared, layer.source.shared_dtype));
  MOESAIC_RETURN_IF_ERROR(
      scheme_of_values({layer.shared}, layer.source.shared, &layer.source.shared_quant));
  if (MOESAIC_FAULT(checkpoint_shared_widened)) {
    MOESAIC_ASSIGN_OR_RETURN(layer.source.shared_quant, linear_scheme({}, DType::kF32));
  }
  MOESAIC_RETURN_IF_ERROR(shared_slice(layer.source, parallel, cut_shared).status());
  return layer;
}

Status check_hash_table(const BoundLayer& layer) {
  MoeLayerTensors table;  // small, and of no use with an expert that does not exist
  return load_hash_table(layer, &table);
}

Result<MoeLayerWeights> make_layer_weights(std::shared_ptr<const ShardSet> shards, BoundLayer layer,
                                           const ParallelConfig& parallel,
                                           std::vector<std::int64_t> expert_ids,
                                           InputScaleRule input_scales, const std::string& label,
                                           const ProgressFn& progress, bool cut_shared) {
  const std::int64_t small = small_bytes(layer);
  LoadProgress counter(progress,
                       small + local_expert_bytes(layer, parallel.tp_size,
                                                  static_cast<std::int64_t>(expert_ids.size())));
  MoeLayerWeights weights;
  weights.spec = layer.source.spec;
  if (!weights.spec.quant_note.empty()) {
    log_warning_once(
        fmt::format("{}: layer {}: {}", label, weights.spec.layer, weights.spec.quant_note));
  }
  MOESAIC_ASSIGN_OR_RETURN(weights.tensors, load_tensors(layer));
  counter.add(small);
  weights.shared_quant = layer.source.shared_quant;
  // Tensors that were not requested may be somebody else's (TensorNeeded).
  if (layer.shared.bytes() > 0) {
    MOESAIC_ASSIGN_OR_RETURN(weights.shared,
                             make_shared_source(shards, layer, parallel, cut_shared, label));
  }
  MOESAIC_ASSIGN_OR_RETURN(
      weights.experts,
      make_checkpoint_source(std::move(shards), std::move(layer), parallel, std::move(expert_ids),
                             label, std::move(counter), input_scales));
  return weights;
}

}  // namespace moesaic::checkpoint
