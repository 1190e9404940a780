// Which names a layer's tensors have: prefix, layout, spelling.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/binding/layer_choices.h"
#include "checkpoint/config/gguf_config.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

std::vector<std::string> block_names(const Family& family, std::string_view layer_prefix,
                                     int layer) {
  std::vector<std::string> blocks;
  for (const ExpertLayout& layout : family.layouts) {
    if (!layout.present()) continue;
    std::string block = block_name(layer_prefix, layer, layout.block);
    if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) {
      blocks.push_back(std::move(block));
    }
  }
  for (const std::string_view module : modules_beside_block(family)) {
    blocks.push_back(block_name(layer_prefix, layer, module));
  }
  return blocks;
}

bool has_tensors(const ShardSet& shards, const std::string& block) {
  return !tensors_under(shards, block + ".").empty();
}

// Which of the known prefixes ("model.layers." ...) this checkpoint's names have.
Result<std::string_view> find_prefix(const Family& family, int layer, const ShardSet& shards) {
  if (family.layer_prefix == kGgufLayerPrefix) return family.layer_prefix;
  std::optional<std::string_view> found;
  for (const std::string_view prefix : layer_prefixes()) {
    const std::vector<std::string> blocks = block_names(family, prefix, layer);
    if (std::none_of(blocks.begin(), blocks.end(),
                     [&](const std::string& block) { return has_tensors(shards, block); })) {
      continue;
    }
    if (found) {
      return Status(StatusCode::kAmbiguousFormat,
                    fmt::format("layer {}: tensors exist under both \"{}{}.\" and \"{}{}.\"", layer,
                                *found, layer, prefix, layer));
    }
    found = prefix;
  }
  return found.value_or(family.layer_prefix);
}

// --- the layout of the experts -------------------------------------------------------------------

// The spelling of a weight's suffix under which any projection of the layout exists in the block.
std::optional<std::string_view> find_layout(const Family& family, const ExpertLayout& layout,
                                            const std::string& block, const ShardSet& shards) {
  const std::string inside = block + ".";
  // A name that two layouts share does not tell which it is.
  const bool shared_down =
      std::count_if(family.layouts.begin(), family.layouts.end(), [&](const ExpertLayout& other) {
        return other.block == layout.block && other.down == layout.down &&
               other.weight_suffixes.names == layout.weight_suffixes.names;
      }) > 1;
  for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
    if (module.empty() || (shared_down && module == layout.down)) continue;
    const std::string fixed = inside + std::string(module.substr(0, module.find("{e}")));
    for (const ShardSet::Located& tensor : tensors_under(shards, fixed)) {
      const std::string_view name = name_of(tensor).substr(inside.size());
      for (const std::string_view suffix : layout.weight_suffixes.list()) {
        if (!name.ends_with(suffix)) continue;
        if (matches_pattern(module, name.substr(0, name.size() - suffix.size()))) return suffix;
      }
    }
  }
  return std::nullopt;
}

// Whether there is any tensor of a single expert, whatever its last part is called (".qweight").
bool has_single_experts(const ExpertLayout& layout, const std::string& block,
                        const ShardSet& shards) {
  if (!layout.present() || !is_per_expert(layout.storage)) return false;
  const std::string inside = block + ".";
  const std::string fixed = inside + std::string(layout.down.substr(0, layout.down.find("{e}")));
  const auto tensors = tensors_under(shards, fixed);
  return std::any_of(tensors.begin(), tensors.end(), [&](const ShardSet::Located& tensor) {
    const std::string_view name = name_of(tensor).substr(inside.size());
    for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
      for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
        if (!module.empty() && matches_pattern(module, name.substr(0, dot))) return true;
      }
    }
    return false;
  });
}

bool same_names(const ExpertLayout& a, const ExpertLayout& b) {
  return a.block == b.block && a.gate == b.gate && a.up == b.up && a.down == b.down &&
         a.weight_suffixes.names == b.weight_suffixes.names;
}

// Which axis of the tensors the outputs lie along, for layouts with the same names (transformers
// saves Qwen3-VL's experts as it holds them, [E, out, in], not as it found them): both tensors
// together say so, since 2I == H and H == I exclude each other. Contradictions are left to the
// check of shapes.
void choose_orientation(const ShardSet& shards, LayerSource* source) {
  const ExpertLayout& layout = *source->layout;
  const auto other = std::find_if(
      source->family->layouts.begin(), source->family->layouts.end(), [&](const ExpertLayout& l) {
        return l.present() && l.storage != layout.storage && same_names(l, layout);
      });
  if (other == source->family->layouts.end()) return;
  int rows = 0, columns = 0;
  const auto look = [&](std::string_view module, std::int64_t outputs) {
    const auto tensor =
        shards.find(fmt::format("{}.{}{}", source->spec.prefix, module, source->weight_suffix));
    if (!tensor || tensor->info->rank != 3) return;
    const auto& shape = tensor->info->shape;
    if (shape[1] == outputs && shape[2] != outputs) ++rows;
    if (shape[2] == outputs && shape[1] != outputs) ++columns;
  };
  look(layout.gate, 2 * source->spec.intermediate_size);
  look(layout.down, source->spec.hidden_size);
  if (MOESAIC_FAULT(checkpoint_orientation_of_names)) return;
  if ((is_columnwise(layout.storage) ? rows : columns) > 0 &&
      (is_columnwise(layout.storage) ? columns : rows) == 0) {
    source->layout = &*other;
  }
}

Status choose_layout(const ShardSet& shards, std::string_view prefix, LayerSource* source) {
  const int layer = source->spec.layer;
  std::string fallback;  // block of the first layout that has any tensor at all
  for (const ExpertLayout& layout : source->family->layouts) {
    if (!layout.present()) continue;
    const std::string block = block_name(prefix, layer, layout.block);
    if (fallback.empty() && has_tensors(shards, block)) fallback = block;
    const std::optional<std::string_view> suffix =
        find_layout(*source->family, layout, block, shards);
    if (!suffix) continue;
    if (source->layout != nullptr && same_names(*source->layout, layout)) continue;
    if (source->layout != nullptr) {
      return {StatusCode::kAmbiguousFormat,
              fmt::format("layer {}: the experts are stored twice, as {}.{}{} and as {}.{}{}",
                          layer, source->spec.prefix, source->layout->gate, source->weight_suffix,
                          block, layout.gate, *suffix)};
    }
    source->layout = &layout;
    source->weight_suffix = *suffix;
    source->spec.prefix = block;
  }
  if (source->layout != nullptr) {
    choose_orientation(shards, source);
    return {};
  }
  // The weights of quantised linears have names of their own. Without any expert: bind_layer will
  // list what is missing from the likeliest layout.
  const ExpertLayout* likeliest = nullptr;
  for (const ExpertLayout& layout : source->family->layouts) {
    const std::string block = block_name(prefix, layer, layout.block);
    if (!layout.present() || (!fallback.empty() && block != fallback)) continue;
    const bool single = has_single_experts(layout, block, shards);
    if (single || likeliest == nullptr) {
      likeliest = &layout;
      source->spec.prefix = block;
    }
    if (single) break;
  }
  if (likeliest == nullptr) return {};
  source->layout = likeliest;
  source->weight_suffix = likeliest->weight_suffixes.names[0];
  return {};
}

// Takes the alternative layout when its first projection exists and the usual one's does not, whatever
// the format calls its tensors.
void choose_shared_layout(const ShardSet& shards, LayerSource* source) {
  const Family& family = *source->family;
  source->shared_layout = &family.shared_layout;
  const auto exists = [&](const ExpertLayout& layout) {
    if (!layout.present()) return false;
    const std::string module = source->shared_module(layout.gate) + ".";
    return !tensors_under(shards, MOESAIC_FAULT(checkpoint_shared_names_of_plain)
                                      ? module + "weight."
                                      : module)
                .empty();
  };
  if (exists(family.shared_alternative) && !exists(family.shared_layout)) {
    source->shared_layout = &family.shared_alternative;
  }
}

// Takes the alternative name when a tensor has it and none has the usual one.
void choose_gate_weight(const ShardSet& shards, LayerSource* source) {
  const Family& family = *source->family;
  const auto exists = [&](std::string_view name) {
    return shards.find(fmt::format("{}.{}", source->spec.prefix, name)).has_value();
  };
  const std::string_view other = family.gate_weight_alternative;
  const bool use_other = !other.empty() && exists(other) && !exists(family.gate_weight);
  source->gate_weight = use_other ? other : family.gate_weight;
}

void choose_correction_bias(const ModelConfig& config, const ShardSet& shards,
                            LayerSource* source) {
  RoutingSpec& routing = source->spec.routing;
  if (!routing.has_correction_bias) return;
  bool found = false;
  for (const std::string_view name : source->family->correction_bias.list()) {
    if (found) break;
    found = shards.find(fmt::format("{}.{}", source->spec.prefix, name)).has_value();
    if (found || source->correction_bias.empty()) source->correction_bias = name;
  }
  if (config.bias_by_presence) routing.has_correction_bias = found;
}

// Whether the name is of routed experts as the layout stores them, in any layer.
bool holds_experts(const ExpertLayout& layout, std::string_view name) {
  if (!layout.present()) return false;
  const std::string_view fixed = layout.down.substr(0, layout.down.find("{e}"));
  const std::string inside = fmt::format("{}.{}", layout.block, fixed);
  return name.find(layout.block.empty() ? inside : "." + inside) != std::string_view::npos;
}

}  // namespace

Status check_no_experts(const ModelConfig& config, const ShardSet& shards) {
  if (config.no_experts.empty()) return {};
  for (const ShardSet::Located& tensor : shards.tensors()) {
    for (const ExpertLayout& layout : config.family->layouts) {
      if (!holds_experts(layout, name_of(tensor))) continue;
      return {StatusCode::kCorruptFile,
              fmt::format("config.json: {}, need 1 to {}, since the files hold the experts of {}",
                          config.no_experts, kMaxExperts, quote_name(name_of(tensor)))};
    }
  }
  return {};
}

std::vector<int> dense_layers_with_experts(const ModelConfig& config, const ShardSet& shards) {
  std::vector<int> found;
  if (config.gguf) return found;  // there the tensors say which layers are MoE
  const auto holds = [&](std::string_view prefix, int layer) {
    for (const ExpertLayout& layout : config.family->layouts) {
      if (!layout.present()) continue;
      const std::string_view fixed = layout.down.substr(0, layout.down.find("{e}"));
      const std::string inside = block_name(prefix, layer, layout.block) + ".";
      if (!tensors_under(shards, inside + std::string(fixed)).empty()) return true;
    }
    return false;
  };
  auto moe = config.layers.begin();
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (moe != config.layers.end() && moe->layer == layer) {
      ++moe;
      continue;
    }
    const auto prefixes = layer_prefixes();
    if (std::any_of(prefixes.begin(), prefixes.end(),
                    [&](std::string_view prefix) { return holds(prefix, layer); })) {
      found.push_back(layer);
    }
  }
  return found;
}

Status choose_names(const ModelConfig& config, const ShardSet& shards, LayerSource* source) {
  MOESAIC_ASSIGN_OR_RETURN(const std::string_view prefix,
                           find_prefix(*config.family, source->spec.layer, shards));
  MOESAIC_RETURN_IF_ERROR(choose_layout(shards, prefix, source));
  choose_shared_layout(shards, source);
  choose_gate_weight(shards, source);
  choose_correction_bias(config, shards, source);
  return {};
}

}  // namespace moesaic::checkpoint
