#include "checkpoint/config/families.h"

#include <fmt/format.h>

#include <cctype>

#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::array<std::string_view, 10> kLayerPrefixes = {
    "model.layers.",
    "language_model.model.layers.",  // Kimi-VL, Llama 4 style wrappers
    "language_model.model.blocks.",  // Kimi-K2.5 as transformers 5 saves it
    "model.language_model.layers.",  // GLM-4.5V, Qwen3-VL style wrappers
    "thinker.model.layers.",         // Qwen3-Omni
    "thinker.model.language_model.layers.",
    "model.llm.layers.",    // Inkling
    "transformer.blocks.",  // DBRX
    "backbone.layers.",     // Nemotron-H
    "layers.",              // the model without its head
};

constexpr std::array<std::string_view, 4> kExpertCount = {"num_experts", "num_local_experts",
                                                          "n_routed_experts", "moe_num_experts"};
constexpr std::array<std::string_view, 7> kTopK = {
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k",
    "moe_top_k",           "top_k_experts"};

constexpr std::string_view kExpertMark = "{e}";

}  // namespace

const Family* find_family(std::string_view model_type) {
  for (const Family& family : families()) {
    for (const std::string_view name : family.model_types.list()) {
      if (name == model_type) return &family;
    }
  }
  return nullptr;
}

std::vector<std::string_view> known_model_types() {
  std::vector<std::string_view> types;
  for (const Family& family : families()) {
    for (const std::string_view name : family.model_types.list()) types.push_back(name);
  }
  return types;
}

std::span<const std::string_view> layer_prefixes() { return kLayerPrefixes; }
std::span<const std::string_view> expert_count_fields() { return kExpertCount; }
std::span<const std::string_view> top_k_fields() { return kTopK; }

std::span<const std::string_view> layer_rule_fields(LayerRule rule) {
  static constexpr auto kSparseStep =
      std::to_array<std::string_view>({"decoder_sparse_step", "mlp_only_layers"});
  static constexpr auto kFirstDense =
      std::to_array<std::string_view>({"first_k_dense_replace", "moe_layer_freq"});
  static constexpr auto kPeriod =
      std::to_array<std::string_view>({"expert_layer_period", "expert_layer_offset"});
  static constexpr auto kInterleave =
      std::to_array<std::string_view>({"moe_layers", "interleave_moe_layer_step"});
  static constexpr auto kInterval = std::to_array<std::string_view>(
      {"moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"});
  static constexpr auto kListed = std::to_array<std::string_view>({"moe_layer_freq"});
  static constexpr auto kEnumerated = std::to_array<std::string_view>({"moe_layers_enum"});
  static constexpr auto kPattern =
      std::to_array<std::string_view>({"layers_block_type", "hybrid_override_pattern"});
  switch (rule) {
    case LayerRule::kSparseStep:
      return kSparseStep;
    case LayerRule::kFirstDense:
      return kFirstDense;
    case LayerRule::kPeriod:
      return kPeriod;
    case LayerRule::kInterleave:
      return kInterleave;
    case LayerRule::kInterval:
      return kInterval;
    case LayerRule::kEnumerated:
      return kEnumerated;
    case LayerRule::kListed:
      return kListed;
    case LayerRule::kPattern:
      return kPattern;
    case LayerRule::kEvery:
      break;
  }
  return {};
}

std::vector<std::string_view> modules_beside_block(const Family& family) {
  std::vector<std::string_view> modules;
  if (family.router_beside_block) {
    modules.push_back(family.gate_weight.substr(0, family.gate_weight.find('.')));
  }
  if (!family.shared_beside_block || MOESAIC_FAULT(checkpoint_shared_beside_unchecked)) {
    return modules;
  }
  for (const ExpertLayout* layout : {&family.shared_layout, &family.shared_alternative}) {
    if (layout->present()) modules.push_back(layout->down.substr(0, layout->down.rfind('.')));
  }
  return modules;
}

std::string block_name(std::string_view layer_prefix, std::int64_t layer, std::string_view block) {
  if (layer_prefix.empty()) return std::string(block);  // a layer described by hand has one block
  return fmt::format("{}{}{}{}", layer_prefix, layer, block.empty() ? "" : ".", block);
}

std::string expand_expert(std::string_view pattern, std::int64_t expert) {
  const std::size_t at = pattern.find(kExpertMark);
  if (at == std::string_view::npos) return std::string(pattern);
  return fmt::format("{}{}{}", pattern.substr(0, at), expert,
                     pattern.substr(at + kExpertMark.size()));
}

bool matches_pattern(std::string_view pattern, std::string_view name) {
  const std::size_t at = pattern.find(kExpertMark);
  if (at == std::string_view::npos) return pattern == name;
  if (!name.starts_with(pattern.substr(0, at))) return false;
  std::string_view rest = name.substr(at);
  std::size_t digits = 0;
  while (digits < rest.size() && std::isdigit(static_cast<unsigned char>(rest[digits])) != 0) {
    ++digits;
  }
  return digits > 0 && rest.substr(digits) == pattern.substr(at + kExpertMark.size());
}

}  // namespace moesaic::checkpoint
