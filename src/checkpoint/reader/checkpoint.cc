#include "moesaic/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/config.h"
#include "checkpoint/config/gguf_config.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/mapped_file.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/shards.h"
#include "checkpoint/reader/layer_weights.h"
#include "checkpoint/reader/side_files.h"
#include "core/fault.h"
#include "moesaic/weight_loader.h"

namespace moesaic {
namespace {

Status read_side_files(const std::string& directory, checkpoint::QuantConfig* quant) {
  checkpoint::SideFiles files(quant);
  for (const std::string_view name : checkpoint::kSideFiles) {
    const std::string path = fmt::format("{}/{}", directory, name);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) continue;
    MOESAIC_ASSIGN_OR_RETURN(const std::string text,
                             checkpoint::read_text_file(path, checkpoint::kMaxConfigBytes));
    MOESAIC_RETURN_IF_ERROR(files.add(name, text));
  }
  return {};
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
  Result<checkpoint::BoundLayer> check(int index, const ParallelConfig& parallel, bool include_gate,
                                       bool cut_shared) const {
    const MoeLayerSpec* spec = find(index);
    if (spec == nullptr) return no_such_layer(index);
    checkpoint::TensorNeeded needed;  // all
    if (!include_gate) {
      needed = [](const checkpoint::LayerSource&, const checkpoint::PlannedTensor& tensor) {
        return !checkpoint::is_gate(tensor.part);
      };
    }
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::BoundLayer layer,
                             checkpoint::check_bound_layer(config, *spec, *shards, parallel,
                                                           input_scales, needed, cut_shared));
    if (!include_gate) layer.gate_weight = layer.gate_bias = layer.router_scale = std::nullopt;
    return layer;
  }

  Result<MoeLayerWeights> load(int index, const ParallelConfig& parallel,
                               const ProgressFn& progress, bool include_gate,
                               bool cut_shared) const {
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::BoundLayer layer,
                             check(index, parallel, include_gate, cut_shared));
    MOESAIC_ASSIGN_OR_RETURN(std::vector<std::int64_t> ids,
                             local_expert_ids(layer.source.spec.num_experts, parallel));
    return checkpoint::make_layer_weights(shards, std::move(layer), parallel, std::move(ids),
                                          input_scales, directory, progress, cut_shared);
  }

  Status open_folder(FileAccess access) {
    MOESAIC_ASSIGN_OR_RETURN(
        const std::string text,
        checkpoint::read_text_file(directory + "/config.json", checkpoint::kMaxConfigBytes));
    Result<checkpoint::ModelConfig> parsed = checkpoint::parse_model_config(text);
    if (!parsed.ok()) return parsed.status().with_context(directory);
    config = std::move(*parsed);
    MOESAIC_RETURN_IF_ERROR(read_side_files(directory, &config.quant).with_context(directory));
    MOESAIC_RETURN_IF_ERROR(checkpoint::check_match_steps(config.quant, std::ssize(config.layers))
                                .with_context(directory));
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::ShardSet set,
                             checkpoint::ShardSet::open(directory, access));
    shards = std::make_shared<const checkpoint::ShardSet>(std::move(set));
    return checkpoint::check_no_experts(config, *shards).with_context(directory);
  }

  Status open_gguf(FileAccess access) {
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::ShardSet set,
                             checkpoint::ShardSet::open_gguf(directory, access));
    MOESAIC_ASSIGN_OR_RETURN(config, checkpoint::read_gguf_config(directory, set.gguf_headers()));
    shards = std::make_shared<const checkpoint::ShardSet>(std::move(set));
    return {};
  }

  Status no_such_layer(int index) const { return checkpoint::no_such_layer(config, index); }
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
      const char* found =
          std::filesystem::exists(directory, error) ? "is not a folder" : "no such folder";
      return Status(StatusCode::kNotFound,
                    fmt::format("{}: {}, need one with config.json and safetensors, or a GGUF file",
                                checkpoint::quote_name(directory), found));
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
  const std::vector<int> dense =
      checkpoint::dense_layers_with_experts(impl_->config, *impl_->shards);
  if (!dense.empty() && !MOESAIC_FAULT(checkpoint_dense_experts_unsaid)) {
    problems.push_back(fmt::format(
        "the files hold experts, which are not read, of layers that config.json calls dense: {}{}",
        fmt::join(std::span(dense).first(std::min(dense.size(), kMaxLayerProblems)), ", "),
        dense.size() > kMaxLayerProblems ? " ..." : ""));
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
                                               const ProgressFn& progress, bool include_gate,
                                               bool cut_shared) const {
  Result<MoeLayerWeights> weights = checkpoint::guard_allocation("checkpoint", [&] {
    return impl_->load(index, parallel, progress, include_gate, cut_shared);
  });
  if (!weights.ok()) return weights.status().with_context(impl_->directory);
  return weights;
}

Result<MoeLayerFormat> Checkpoint::check_layer(int index, const ParallelConfig& parallel,
                                               bool include_gate, bool cut_shared) const {
  return checkpoint::guard_allocation("checkpoint", [&]() -> Result<MoeLayerFormat> {
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::BoundLayer layer,
                             impl_->check(index, parallel, include_gate, cut_shared));
    MOESAIC_RETURN_IF_ERROR(checkpoint::check_hash_table(layer));
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

Result<WeightLoader> WeightLoader::from_checkpoint(const Checkpoint& checkpoint, int index,
                                                   const Options& options) {
  if (checkpoint.impl_->find(index) == nullptr) return checkpoint.impl_->no_such_layer(index);
  return make(checkpoint.impl_->config, index, options);
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
