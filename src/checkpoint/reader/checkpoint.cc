#include "moesaic/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/config.h"
#include "checkpoint/config/gguf_config.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/mapped_file.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/shards.h"
#include "checkpoint/reader/expert_source.h"
#include "checkpoint/reader/input_scales.h"
#include "checkpoint/reader/linear_numbers.h"
#include "checkpoint/reader/mlp_reader.h"
#include "core/fault.h"
#include "moesaic/log.h"
#include "quant/width_slice.h"

namespace moesaic {
namespace {

// Other programs describe their quantisation in files of their own, some in config.json too. Two
// descriptions must be equal.
Status read_side_files(const std::string& directory, checkpoint::QuantConfig* quant) {
  constexpr std::array<std::string_view, 3> kSideFiles = {
      "hf_quant_config.json", "quantize_config.json", "quant_config.json"};
  std::string_view from = quant->quantized() ? "quantization_config of config.json" : "";
  for (const std::string_view name : kSideFiles) {
    const std::string path = fmt::format("{}/{}", directory, name);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) continue;
    MOESAIC_ASSIGN_OR_RETURN(const std::string text,
                             checkpoint::read_text_file(path, checkpoint::kMaxConfigBytes));
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::QuantConfig found,
                             checkpoint::parse_quant_side_file(name, text));
    if (!from.empty() && !checkpoint::same_quantisation(found, *quant)) {
      return {StatusCode::kAmbiguousFormat,
              fmt::format("{}: describes the quantisation otherwise than {}; need one description",
                          name, from)};
    }
    *quant = std::move(found);
    from = name;
  }
  return {};
}

std::int64_t optional_bytes(const std::optional<checkpoint::ShardSet::Located>& tensor) {
  return tensor ? static_cast<std::int64_t>(tensor->info->bytes()) : 0;
}

// What is counted as loaded at once: the router, and the shared expert, which not every rank reads.
std::int64_t small_bytes(const checkpoint::BoundLayer& layer) {
  const std::int64_t bytes =
      optional_bytes(layer.gate_weight) + optional_bytes(layer.gate_bias) +
      optional_bytes(layer.correction_bias) + optional_bytes(layer.shared_gate) +
      optional_bytes(layer.hash_table) + optional_bytes(layer.router_scale) +
      optional_bytes(layer.experts_norm) + optional_bytes(layer.expert_scale);
  return bytes + layer.shared.bytes();
}

// Expert ids of every token, [vocabulary, k], as I32.
Status load_hash_table(const checkpoint::BoundLayer& layer, MoeLayerTensors* tensors) {
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
                          checkpoint::quote_name(layer.hash_table->info->name), i / routing.top_k,
                          i % routing.top_k, id, routing.num_experts - 1)};
    }
    tensors->hash_table.as<std::int32_t>()[i] = static_cast<std::int32_t>(id);
  }
  return {};
}

// Scales of a router that sees normalised rows become part of its weight:
// W[e, h] * scale[h] / sqrt(H), rounded once to F32.
Status load_input_norm(const checkpoint::BoundLayer& layer, MoeLayerTensors* tensors) {
  if (!layer.router_scale) return {};
  const std::int64_t hidden = layer.source.spec.hidden_size;
  const std::int64_t experts = layer.source.spec.num_experts;
  MOESAIC_ASSIGN_OR_RETURN(const Tensor scale,
                           checkpoint::read_widened(*layer.router_scale, {hidden}));
  MOESAIC_ASSIGN_OR_RETURN(tensors->gate_weight,
                           checkpoint::read_widened(*layer.gate_weight, {experts, hidden}));
  const double root = std::sqrt(static_cast<double>(hidden));
  float* const weight = tensors->gate_weight.as<float>();
  for (std::int64_t i = 0; i < experts * hidden; ++i) {
    if (MOESAIC_FAULT(checkpoint_forget_router_scale)) break;
    weight[i] =
        static_cast<float>(double{weight[i]} * double{scale.as<float>()[i % hidden]} / root);
  }
  MOESAIC_ASSIGN_OR_RETURN(tensors->experts_norm_weight,
                           checkpoint::read_widened(*layer.experts_norm, {hidden}));
  MOESAIC_ASSIGN_OR_RETURN(tensors->expert_scale,
                           checkpoint::read_widened(*layer.expert_scale, {experts}));
  return {};
}

Result<MoeLayerTensors> load_tensors(const checkpoint::BoundLayer& layer) {
  const auto read_stored = [](const std::optional<checkpoint::ShardSet::Located>& from,
                              Tensor* to) -> Status {
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
        checkpoint::read_widened(
            *layer.correction_bias,
            {layer.source.spec.num_experts + layer.source.spec.routing.num_zero_experts}));
  }
  MOESAIC_RETURN_IF_ERROR(load_hash_table(layer, &tensors));
  MOESAIC_RETURN_IF_ERROR(load_input_norm(layer, &tensors));
  return tensors;
}

// Divisibility of what this rank gets, before any tensor is looked at.
Status check_parallel(const checkpoint::LayerSource& source, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(parallel.validate());
  MOESAIC_RETURN_IF_ERROR(checkpoint::width_slice(source, parallel).status());
  return quant::slice_width("shared.intermediate_size", source.spec.shared.intermediate_size, 1, 0,
                            checkpoint::slice_unit(source.shared), false)
      .status();
}

}  // namespace

struct Checkpoint::Impl {
  std::string directory;
  checkpoint::ModelConfig config;
  std::shared_ptr<const checkpoint::ShardSet> shards;
  std::vector<MoeLayerSpec> layers;  // resolved where possible
  InputScaleRule input_scales = InputScaleRule::kPerExpert;

  const MoeLayerSpec* find(int index) const {
    for (const MoeLayerSpec& spec : config.layers) {
      if (spec.layer == index) return &spec;
    }
    return nullptr;
  }

  // All checks that need no weights.
  Result<checkpoint::BoundLayer> check(int index, const ParallelConfig& parallel) const {
    const MoeLayerSpec* spec = find(index);
    if (spec == nullptr) return no_such_layer(index);
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::BoundLayer layer,
                             checkpoint::bind_layer(config, *spec, *shards));
    MOESAIC_RETURN_IF_ERROR(check_parallel(layer.source, parallel));
    MOESAIC_RETURN_IF_ERROR(checkpoint::scheme_of_values(layer.experts, layer.source.experts,
                                                         &layer.source.spec.quant));
    MOESAIC_RETURN_IF_ERROR(checkpoint::note_input_scales(input_scales, &layer));
    if (!layer.source.has_shared()) {
      layer.source.shared_quant = layer.source.spec.quant;
      return layer;
    }
    MOESAIC_ASSIGN_OR_RETURN(
        layer.source.shared_quant,
        checkpoint::linear_scheme(layer.source.shared, layer.source.shared_dtype));
    MOESAIC_RETURN_IF_ERROR(checkpoint::scheme_of_values({layer.shared}, layer.source.shared,
                                                         &layer.source.shared_quant));
    if (MOESAIC_FAULT(checkpoint_shared_widened)) {
      MOESAIC_ASSIGN_OR_RETURN(layer.source.shared_quant,
                               checkpoint::linear_scheme({}, DType::kF32));
    }
    return layer;
  }

  Result<MoeLayerWeights> load(int index, const ParallelConfig& parallel,
                               const ProgressFn& progress) const {
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::BoundLayer layer, check(index, parallel));
    const std::int64_t small = small_bytes(layer);
    MOESAIC_ASSIGN_OR_RETURN(std::vector<std::int64_t> ids,
                             local_expert_ids(layer.source.spec.num_experts, parallel));
    checkpoint::LoadProgress counter(
        progress, small + checkpoint::local_expert_bytes(layer, parallel.tp_size,
                                                         static_cast<std::int64_t>(ids.size())));
    MoeLayerWeights weights;
    weights.spec = layer.source.spec;
    if (!weights.spec.quant_note.empty()) {
      log_warning_once(fmt::format("{}: layer {}: {}", directory, index, weights.spec.quant_note));
    }
    MOESAIC_ASSIGN_OR_RETURN(weights.tensors, load_tensors(layer));
    counter.add(small);
    weights.shared_quant = layer.source.shared_quant;
    if (layer.source.has_shared()) {
      MOESAIC_ASSIGN_OR_RETURN(weights.shared,
                               checkpoint::make_shared_source(shards, layer, directory));
    }
    MOESAIC_ASSIGN_OR_RETURN(
        weights.experts,
        checkpoint::make_checkpoint_source(shards, std::move(layer), parallel, std::move(ids),
                                           directory, std::move(counter), input_scales));
    return weights;
  }

  Status open_folder(FileAccess access) {
    MOESAIC_ASSIGN_OR_RETURN(
        const std::string text,
        checkpoint::read_text_file(directory + "/config.json", checkpoint::kMaxConfigBytes));
    Result<checkpoint::ModelConfig> parsed = checkpoint::parse_model_config(text);
    if (!parsed.ok()) return parsed.status().with_context(directory);
    config = std::move(*parsed);
    MOESAIC_RETURN_IF_ERROR(read_side_files(directory, &config.quant).with_context(directory));
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::ShardSet set,
                             checkpoint::ShardSet::open(directory, access));
    shards = std::make_shared<const checkpoint::ShardSet>(std::move(set));
    return {};
  }

  Status open_gguf(FileAccess access) {
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::ShardSet set,
                             checkpoint::ShardSet::open_gguf(directory, access));
    MOESAIC_ASSIGN_OR_RETURN(config, checkpoint::read_gguf_config(directory, set.gguf_headers()));
    shards = std::make_shared<const checkpoint::ShardSet>(std::move(set));
    return {};
  }

  Status no_such_layer(int index) const {
    std::string list;
    for (const MoeLayerSpec& spec : config.layers) {
      if (list.size() > 200) {  // a longer list would not be read
        list += fmt::format(" ... {}", config.layers.back().layer);
        break;
      }
      list += fmt::format("{}{}", list.empty() ? "" : ", ", spec.layer);
    }
    return {StatusCode::kNotFound, fmt::format("layer: got {}, need one of the MoE layers: {}",
                                               index, list.empty() ? "none" : list)};
  }
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Result<Checkpoint> Checkpoint::open(const std::string& directory, const Options& options) {
  return checkpoint::guard_allocation("checkpoint", [&]() -> Result<Checkpoint> {
    auto impl = std::make_unique<Impl>();
    impl->directory = directory;
    impl->input_scales = options.input_scales;
    std::error_code error;
    if (std::filesystem::is_directory(directory, error)) {
      MOESAIC_RETURN_IF_ERROR(impl->open_folder(options.access));
    } else if (checkpoint::has_gguf_magic(directory) || directory.ends_with(".gguf")) {
      MOESAIC_RETURN_IF_ERROR(impl->open_gguf(options.access));
    } else {
      return Status(StatusCode::kNotFound,
                    fmt::format("{}: no such folder, need one with config.json and safetensors, "
                                "or a GGUF file",
                                checkpoint::quote_name(directory)));
    }
    for (const MoeLayerSpec& spec : impl->config.layers) {
      // A layer that cannot be resolved keeps what the configuration says; problems() tells why.
      const Result<checkpoint::LayerSource> source =
          checkpoint::resolve_layer(impl->config, spec, *impl->shards);
      impl->layers.push_back(source.ok() ? source->spec : spec);
    }
    return Checkpoint(std::move(impl));
  });
}

const std::string& Checkpoint::model_type() const { return impl_->config.model_type; }

std::span<const MoeLayerSpec> Checkpoint::layers() const { return impl_->layers; }

Result<MoeLayerSpec> Checkpoint::layer(int index) const {
  for (const MoeLayerSpec& spec : impl_->layers) {
    if (spec.layer == index) return spec;
  }
  return impl_->no_such_layer(index);
}

std::int64_t Checkpoint::layer_bytes(int index) const {
  for (const MoeLayerSpec& spec : impl_->layers) {
    if (spec.layer == index) return checkpoint::stored_block_bytes(spec.prefix, *impl_->shards);
  }
  return 0;
}

std::vector<std::string> Checkpoint::problems() const {
  // One broken layer says as much as a thousand; and each costs a walk over its tensors.
  constexpr std::size_t kMaxLayerProblems = 16;
  std::vector<std::string> problems = impl_->shards->warnings();
  if (impl_->config.layers.empty()) {
    problems.push_back(impl_->config.gguf ? "the file holds no MoE layer"
                                          : "config.json describes no MoE layer");
  }
  std::size_t broken = 0;
  for (const MoeLayerSpec& spec : impl_->config.layers) {
    const Result<MoeLayerFormat> layer = check_layer(spec.layer);
    if (layer.ok()) continue;
    problems.push_back(layer.status().message());
    if (++broken == kMaxLayerProblems) {
      problems.push_back("further layers were not examined");
      break;
    }
  }
  return problems;
}

Result<MoeLayerWeights> Checkpoint::load_layer(int index, const ParallelConfig& parallel,
                                               const ProgressFn& progress) const {
  Result<MoeLayerWeights> weights = checkpoint::guard_allocation(
      "checkpoint", [&] { return impl_->load(index, parallel, progress); });
  if (!weights.ok()) return weights.status().with_context(impl_->directory);
  return weights;
}

Result<MoeLayerFormat> Checkpoint::check_layer(int index, const ParallelConfig& parallel) const {
  return checkpoint::guard_allocation("checkpoint", [&]() -> Result<MoeLayerFormat> {
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::BoundLayer layer, impl_->check(index, parallel));
    MoeLayerTensors table;  // small, and of no use with an expert that does not exist
    MOESAIC_RETURN_IF_ERROR(load_hash_table(layer, &table));
    MoeLayerFormat format;
    format.spec = layer.source.spec;
    format.shared_quant = layer.source.shared_quant;
    // The router's own norm is multiplied into the gate's weight, in F32.
    if (layer.gate_weight) {
      format.gate_dtype = layer.router_scale ? DType::kF32 : layer.gate_weight->info->dtype;
    }
    return format;
  });
}

Result<Tensor> Checkpoint::read_tensor(const std::string& name) const {
  return checkpoint::guard_allocation("checkpoint", [&]() -> Result<Tensor> {
    const auto found = impl_->shards->find(name);
    if (found) return found->file->read_tensor(*found->info);
    std::vector<std::string_view> names;
    for (const checkpoint::ShardSet::Located& tensor : impl_->shards->tensors()) {
      names.push_back(tensor.info->name);
    }
    const std::string nearest = checkpoint::similar_name(name, names);
    return Status(
        StatusCode::kNotFound,
        fmt::format("tensor: got {}, which is not in the checkpoint{}{}",
                    checkpoint::quote_name(name), nearest.empty() ? "" : "; nearest is ", nearest));
  });
}

}  // namespace moesaic
