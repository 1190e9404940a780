#include "checkpoint/config/gguf_config.h"

#include <fmt/format.h>

#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/config/gguf_architectures.h"
#include "checkpoint/config/gguf_fields.h"
#include "checkpoint/config/gguf_layer_fields.h"
#include "checkpoint/config/gguf_metadata.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

bool predicts(std::span<const GgufHeader* const> headers) {
  for (const GgufHeader* header : headers) {
    for (const TensorInfo& tensor : header->tensors) {
      if (tensor.name.ends_with(".nextn.eh_proj.weight")) return true;
    }
  }
  return false;
}

// Blocks without the last ones, which predict further tokens and are no part of the model.
Result<std::int64_t> main_layers(const GgufMetadata& metadata, std::int64_t blocks,
                                 std::span<const GgufHeader* const> headers) {
  MOESAIC_ASSIGN_OR_RETURN(const auto predict,
                           metadata.integer("nextn_predict_layers", 0, blocks - 1));
  if (MOESAIC_FAULT(gguf_prediction_layers_are_listed)) return blocks;
  // Files of DeepSeek-V4 count such blocks and may have been written without them.
  if (metadata.architecture() == "deepseek4" && !predicts(headers)) return blocks;
  return blocks - predict.value_or(0);
}

// "blk.3.ffn..." -> 3, or -1.
int layer_of(std::string_view name, std::int64_t num_layers) {
  name.remove_prefix(kGgufLayerPrefix.size());
  std::int64_t layer = 0;
  std::size_t digits = 0;
  while (digits < name.size() && digits < 6 &&
         std::isdigit(static_cast<unsigned char>(name[digits])) != 0) {
    layer = layer * 10 + (name[digits++] - '0');
  }
  const bool sound = digits > 0 && digits < name.size() && name[digits] == '.' &&
                     (digits == 1 || name[0] != '0') && layer < num_layers;
  return sound ? static_cast<int>(layer) : -1;
}

std::set<int> moe_layers_of(std::span<const GgufHeader* const> headers, std::int64_t num_layers) {
  std::set<int> layers;
  for (const GgufHeader* header : headers) {
    for (const TensorInfo& tensor : header->tensors) {
      if (is_gguf_moe_tensor(tensor.name)) layers.insert(layer_of(tensor.name, num_layers));
    }
  }
  layers.erase(-1);
  return layers;
}

// A model without experts, by its metadata: its tensors must not say otherwise.
Result<ModelConfig> dense_model(const GgufMetadata& metadata, const GgufArchitecture& architecture,
                                std::int64_t num_layers, bool zero,
                                std::span<const GgufHeader* const> headers) {
  for (const GgufHeader* header : headers) {
    for (const TensorInfo& tensor : header->tensors) {
      const bool stacked =
          is_gguf_moe_tensor(tensor.name) && tensor.name.find("_exps.") != std::string::npos;
      if (!stacked && !is_gguf_single_expert(tensor.name)) continue;
      return metadata.bad(
          StatusCode::kCorruptFile, fmt::format("{}.expert_count", metadata.architecture()),
          fmt::format("{}, need 1 to {}, since the file holds the experts of {}",
                      zero ? "got 0" : "missing", kMaxExperts, quote_name(tensor.name)));
    }
  }
  ModelConfig dense;
  dense.model_type = architecture.model_type;
  dense.family = gguf_family(architecture.model_type);
  dense.num_hidden_layers = num_layers;
  dense.gguf = true;
  return dense;
}

Result<ModelConfig> read_checked(std::string_view label,
                                 std::span<const GgufHeader* const> headers) {
  GgufMetadata metadata(label, *headers.front());
  MOESAIC_ASSIGN_OR_RETURN(const GgufArchitecture* architecture, find_gguf_architecture(metadata));
  metadata.set_architecture(std::string(architecture->name));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t num_blocks,
                           metadata.required("block_count", 1, kMaxLayers));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t num_layers,
                           main_layers(metadata, num_blocks, headers));
  MOESAIC_ASSIGN_OR_RETURN(const auto num_experts,
                           metadata.integer("expert_count", 0, kMaxExperts));
  if (num_experts.value_or(0) == 0) {
    return dense_model(metadata, *architecture, num_layers, num_experts.has_value(), headers);
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::string_view model_type,
                           gguf_model_type(metadata, *architecture, *num_experts));
  const Family& family = *gguf_family(model_type);
  MOESAIC_RETURN_IF_ERROR(check_gguf_routing(metadata, *architecture, family));
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json fields,
                           gguf_fields(metadata, *architecture, family, model_type, *num_experts));
  MOESAIC_ASSIGN_OR_RETURN(const GgufLayerFields layer_fields,
                           GgufLayerFields::read(metadata, *architecture, family, num_blocks));
  // The shared expert's sizes and those of dense layers, in families without them.
  for (const std::string_view name : {"expert_shared_count", "expert_shared_feed_forward_length"}) {
    MOESAIC_RETURN_IF_ERROR(metadata.integer(name, 0, kMaxWidth).status());
  }
  MOESAIC_RETURN_IF_ERROR(metadata.check_unread());

  // Layers with equal numbers are read once; without any the configuration is checked all the same.
  std::map<std::vector<double>, ModelConfig> read;
  const auto one_layer = [&](int layer) -> Result<const ModelConfig*> {
    const std::vector<double> numbers = layer_fields.of(layer);
    if (const auto it = read.find(numbers); it != read.end()) return &it->second;
    nlohmann::json json = fields;
    MOESAIC_RETURN_IF_ERROR(layer_fields.add(metadata, layer, &json));
    Result<ModelConfig> config = parse_model_config(json.dump());
    if (!config.ok()) {
      return config.status().with_context(fmt::format("{}: architecture {} as a {} configuration",
                                                      label, architecture->name, model_type));
    }
    if (config->layers.size() != 1) {
      return metadata.bad(StatusCode::kInternal, "general.architecture",
                          fmt::format("{} makes no layer of experts", family.title));
    }
    return &read.emplace(numbers, *std::move(config)).first->second;
  };
  const std::set<int> layers = moe_layers_of(headers, num_layers);
  MOESAIC_ASSIGN_OR_RETURN(const ModelConfig* first,
                           one_layer(layers.empty() ? 0 : *layers.begin()));
  ModelConfig config = *first;
  config.family = &family;
  config.gguf = true;
  config.num_hidden_layers = num_layers;
  config.layers.clear();
  for (const int layer : layers) {
    MOESAIC_ASSIGN_OR_RETURN(const ModelConfig* same, one_layer(layer));
    config.layers.push_back(same->layers.front());
    config.layers.back().layer = layer;
    config.layers.back().prefix = fmt::format("{}{}", kGgufLayerPrefix, layer);
  }
  return config;
}

}  // namespace

bool is_gguf_moe_tensor(std::string_view name) {
  if (!name.starts_with(kGgufLayerPrefix)) return false;
  const std::size_t dot = name.find('.', kGgufLayerPrefix.size());
  if (dot == std::string_view::npos) return false;
  const std::string_view rest = name.substr(dot + 1);
  if (rest.starts_with("exp_probs_b") || rest.starts_with("ffn_gate_inp") ||
      rest.starts_with("ffn_gate_tid2eid")) {
    return true;
  }
  if (is_gguf_single_expert(name)) return true;
  if (!rest.starts_with("ffn_")) return false;
  const std::string_view module = rest.substr(0, rest.find('.'));
  return module.ends_with("_exps") || module.ends_with("_shexp");
}

bool is_gguf_single_expert(std::string_view name) {
  if (!name.starts_with(kGgufLayerPrefix)) return false;
  const std::size_t dot = name.find('.', kGgufLayerPrefix.size());
  if (dot == std::string_view::npos) return false;
  const std::string_view rest = name.substr(dot + 1);
  for (const std::string_view module : {"ffn_gate.", "ffn_up.", "ffn_down."}) {
    if (!rest.starts_with(module)) continue;
    const std::string_view expert = rest.substr(module.size());
    return !expert.empty() && std::isdigit(static_cast<unsigned char>(expert.front())) != 0;
  }
  return false;
}

Result<ModelConfig> read_gguf_config(std::string_view label,
                                     std::span<const GgufHeader* const> headers) {
  return guard_allocation(label, [&] { return read_checked(label, headers); });
}

}  // namespace moesaic::checkpoint
