#include "checkpoint/config/gguf_config.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/config/gguf_metadata.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// How an architecture name maps to a family, and what llama.cpp assumes where the file is silent.
struct Architecture {
  std::string_view name;
  std::string_view model_type;
  bool default_renorm = false;  // expert_weights_norm
};

// deepseek2 stands for V2, V3 and Kimi-K2: see model_type_of.
constexpr auto kArchitectures = std::to_array<Architecture>({
    {"llama", "mixtral"},
    {"qwen2moe", "qwen2_moe"},
    {"qwen3moe", "qwen3_moe", true},
    {"qwen3vlmoe", "qwen3_vl_moe_text"},
    {"qwen3next", "qwen3_next", true},
    {"qwen35moe", "qwen3_5_moe_text"},
    {"deepseek2", "deepseek_v3"},
    {"glm4moe", "glm4_moe"},
    {"dots1", "dots1"},
    {"minimax-m2", "minimax_m2"},
    {"olmoe", "olmoe"},
    {"gpt-oss", "gpt_oss"},
    {"llama4", "llama4_text"},
    {"phimoe", "phimoe"},
    {"granitemoe", "granitemoe"},
    {"granitehybrid", "granitemoe"},
    {"jamba", "jamba"},
    {"dbrx", "dbrx"},
    {"hunyuan-moe", "hunyuan_v1_moe"},
    {"ernie4_5-moe", "ernie4_5_moe"},
    {"nemotron_h_moe", "nemotron_h"},
});

// Values of expert_gating_func.
constexpr std::int64_t kGatingSoftmax = 1;
constexpr std::int64_t kGatingSigmoid = 2;
constexpr std::int64_t kGatingSoftmaxOfSelected = 3;

// The family's own function, as expert_gating_func would say it.
std::int64_t gating_of(const Family& family) {
  if (family.routing.method == RoutingMethod::kTopKSoftmax) return kGatingSoftmaxOfSelected;
  const bool sigmoid = family.routing.scoring_func == ScoringFunc::kSigmoid ||
                       family.routing.method == RoutingMethod::kLlama4;
  return sigmoid ? kGatingSigmoid : kGatingSoftmax;
}

Result<const Architecture*> find_architecture(const GgufMetadata& metadata) {
  MOESAIC_ASSIGN_OR_RETURN(const std::string name, metadata.string("general.architecture"));
  std::vector<std::string_view> known;
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.name == name) return &architecture;
    known.push_back(architecture.name);
  }
  const std::string nearest = similar_name(name, known);
  return metadata.bad(
      StatusCode::kUnsupported, "general.architecture",
      fmt::format("got {}, which is not supported; known are {}{}{}", quote_name(name),
                  fmt::join(known, ", "), nearest.empty() ? "" : "; nearest is ", nearest));
}

// One architecture for three families: the gating function tells V2 from the others, the grouping
// of experts (which older files do not state) V3 from Kimi-K2.
Result<std::string_view> model_type_of(const GgufMetadata& metadata,
                                       const Architecture& architecture, std::int64_t num_experts) {
  MOESAIC_ASSIGN_OR_RETURN(const auto gating, metadata.integer("expert_gating_func", 0, 255));
  if (architecture.model_type == "granitemoe") {
    MOESAIC_ASSIGN_OR_RETURN(const auto shared,
                             metadata.integer("expert_shared_feed_forward_length", 0, kMaxWidth));
    const bool hybrid = architecture.name == "granitehybrid";
    if (shared.value_or(0) > 0) {
      return std::string_view(hybrid ? "granitemoehybrid" : "granitemoeshared");
    }
  }
  if (architecture.name != "deepseek2") return architecture.model_type;
  if (gating.value_or(kGatingSoftmax) != kGatingSigmoid) return std::string_view("deepseek_v2");
  constexpr std::int64_t kV3Experts = 256;
  return std::string_view(num_experts == kV3Experts ? "deepseek_v3" : "kimi_k2");
}

Status check_gating(const GgufMetadata& metadata, const Family& family) {
  MOESAIC_ASSIGN_OR_RETURN(const auto gating, metadata.integer("expert_gating_func", 0, 255));
  // 0: the writer left it to the architecture.
  if (!gating || *gating == 0 || *gating == gating_of(family)) return {};
  return metadata.bad(
      StatusCode::kAmbiguousFormat, fmt::format("{}.expert_gating_func", metadata.architecture()),
      fmt::format("got {}, need {} for {} models", *gating, gating_of(family), family.title));
}

// What the family does not leave to the file: the file may say so, but nothing else.
Status check_fixed_routing(const GgufMetadata& metadata, const Family& family) {
  const RoutingRule& rule = family.routing;
  const auto key = [&](std::string_view name) {
    return fmt::format("{}.{}", metadata.architecture(), name);
  };
  MOESAIC_ASSIGN_OR_RETURN(const auto norm, metadata.boolean("expert_weights_norm"));
  if (norm && rule.renorm != RenormRule::kStated && rule.method == RoutingMethod::kTopK) {
    const bool need = rule.renorm != RenormRule::kNever;
    if (*norm != need) {
      return metadata.bad(StatusCode::kUnsupported, key("expert_weights_norm"),
                          fmt::format("got {}, need {} for {} models", *norm, need, family.title));
    }
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto scale, metadata.number("expert_weights_scale"));
  if (scale && rule.scale == ScaleRule::kNone && *scale != 0 && *scale != 1) {
    return metadata.bad(StatusCode::kUnsupported, key("expert_weights_scale"),
                        fmt::format("got {}, need 1 for {} models", *scale, family.title));
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto groups,
                           metadata.integer("expert_group_count", 0, kMaxExperts));
  MOESAIC_ASSIGN_OR_RETURN(const auto used,
                           metadata.integer("expert_group_used_count", 0, kMaxExperts));
  if (!rule.reads_groups && groups.value_or(1) > 1 && used.value_or(0) != *groups) {
    return metadata.bad(StatusCode::kUnsupported, key("expert_group_count"),
                        fmt::format("got {}, need 1 for {} models", *groups, family.title));
  }
  return {};
}

// The experts' part of a config.json that says what the metadata say.
Result<nlohmann::json> routing_fields(const GgufMetadata& metadata, const Family& family,
                                      const Architecture& architecture) {
  nlohmann::json json = nlohmann::json::object();
  const RoutingRule& rule = family.routing;
  if (rule.renorm == RenormRule::kStated) {
    MOESAIC_ASSIGN_OR_RETURN(const auto renorm, metadata.boolean("expert_weights_norm"));
    json[std::string(rule.renorm_field)] = renorm.value_or(architecture.default_renorm);
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto scale, metadata.number("expert_weights_scale"));
  // 0 means that there is none.
  if (rule.scale != ScaleRule::kNone && scale && *scale != 0) {
    json[std::string(rule.scale_field)] = *scale;
  } else if (rule.scale != ScaleRule::kNone) {
    json[std::string(rule.scale_field)] = 1.0;
  }
  if (rule.reads_groups) {
    MOESAIC_ASSIGN_OR_RETURN(const auto groups,
                             metadata.integer("expert_group_count", 0, kMaxExperts));
    MOESAIC_ASSIGN_OR_RETURN(const auto used,
                             metadata.integer("expert_group_used_count", 0, kMaxExperts));
    if (groups.value_or(0) > 0) json["n_group"] = *groups;
    if (used.value_or(0) > 0) json["topk_group"] = *used;
    if (rule.default_topk_method == "greedy" && groups.value_or(0) > 1) {
      json["topk_method"] = "group_limited_greedy";
    }
  }
  return json;
}

// Qwen's first files with experts have one width, that of the experts that are used together.
bool has_qwen_widths(const Architecture& architecture) {
  return architecture.name == "qwen2moe" || architecture.name == "qwen3moe";
}

Result<std::int64_t> expert_width(const GgufMetadata& metadata, const Architecture& architecture,
                                  std::int64_t used) {
  MOESAIC_ASSIGN_OR_RETURN(const auto width,
                           metadata.integer("expert_feed_forward_length", 1, kMaxWidth));
  if (width) return *width;
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t whole,
                           metadata.required("feed_forward_length", 1, kMaxWidth));
  if (!has_qwen_widths(architecture)) return whole;
  if (whole % used == 0) return whole / used;
  return metadata.bad(StatusCode::kInvalidArgument,
                      fmt::format("{}.feed_forward_length", metadata.architecture()),
                      fmt::format("got {}, need a multiple of expert_used_count {} as there is no "
                                  "expert_feed_forward_length",
                                  whole, used));
}

Status add_shared(const GgufMetadata& metadata, const Architecture& architecture,
                  const Family& family, nlohmann::json* json) {
  if (family.shared == SharedRule::kNone) return {};
  MOESAIC_ASSIGN_OR_RETURN(const auto count, metadata.integer("expert_shared_count", 0, 1024));
  MOESAIC_ASSIGN_OR_RETURN(auto width,
                           metadata.integer("expert_shared_feed_forward_length", 0, kMaxWidth));
  if (!width && has_qwen_widths(architecture)) {
    MOESAIC_ASSIGN_OR_RETURN(width, metadata.integer("feed_forward_length", 1, kMaxWidth));
  }
  // Such a shared expert has a gate of its own, and so is always there.
  const bool needed = family.shared == SharedRule::kOwnWidth && !family.shared_gate.empty() &&
                      family.shared_count_field.empty() && family.default_shared_width == 0;
  if (!width && needed) {
    MOESAIC_ASSIGN_OR_RETURN(width,
                             metadata.required("expert_shared_feed_forward_length", 1, kMaxWidth));
  }
  if (family.shared == SharedRule::kCount) {
    (*json)[std::string(family.shared_count_field)] = count.value_or(0);
    return {};
  }
  // Where the family says "count times width", the file's width is that of the whole MLP.
  if (!family.shared_count_field.empty()) {
    nlohmann::json& stated = (*json)[std::string(family.shared_count_field)];
    if (width.value_or(0) > 0) stated = 1;  // else null: there is none
  }
  if (width && *width > 0) (*json)[std::string(family.shared_width_field)] = *width;
  return {};
}

// One MoE layer, whatever the family's rule for which layers are: the tensors decide that.
void add_layer_rule(const Family& family, nlohmann::json* json) {
  (*json)[std::string(family.num_layers_field)] = 1;
  switch (family.layer_rule) {
    case LayerRule::kEvery:
      return;
    case LayerRule::kSparseStep:
      (*json)["decoder_sparse_step"] = 1;
      return;
    case LayerRule::kFirstDense:
      (*json)["first_k_dense_replace"] = 0;
      return;
    case LayerRule::kPeriod:
      (*json)["expert_layer_period"] = 1;
      (*json)["expert_layer_offset"] = 0;
      return;
    case LayerRule::kInterleave:
      (*json)["interleave_moe_layer_step"] = 1;
      return;
    case LayerRule::kInterval:
      (*json)["moe_layer_start_index"] = 0;
      (*json)["moe_layer_interval"] = 1;
      return;
    case LayerRule::kEnumerated:
      (*json)["moe_layers_enum"] = "0";
      return;
    case LayerRule::kListed:
      (*json)["moe_layer_freq"] = {1};
      return;
    case LayerRule::kPattern:
      (*json)["hybrid_override_pattern"] = "E";
      return;
  }
}

// Blocks without the last ones, which predict further tokens and are no part of the model.
Result<std::int64_t> main_layers(const GgufMetadata& metadata) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t blocks,
                           metadata.required("block_count", 1, kMaxLayers));
  MOESAIC_ASSIGN_OR_RETURN(const auto predict,
                           metadata.integer("nextn_predict_layers", 0, blocks - 1));
  return MOESAIC_FAULT(gguf_prediction_layers_are_listed) ? blocks : blocks - predict.value_or(0);
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

// A model without experts, by its metadata: its tensors must not say otherwise.
Result<ModelConfig> dense_model(const GgufMetadata& metadata, const Architecture& architecture,
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
  MOESAIC_ASSIGN_OR_RETURN(const Architecture* architecture, find_architecture(metadata));
  metadata.set_architecture(std::string(architecture->name));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t num_layers, main_layers(metadata));
  MOESAIC_ASSIGN_OR_RETURN(const auto num_experts,
                           metadata.integer("expert_count", 0, kMaxExperts));
  if (num_experts.value_or(0) == 0) {
    return dense_model(metadata, *architecture, num_layers, num_experts.has_value(), headers);
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::string_view model_type,
                           model_type_of(metadata, *architecture, *num_experts));
  const Family& family = *gguf_family(model_type);
  MOESAIC_RETURN_IF_ERROR(check_gating(metadata, family));
  MOESAIC_RETURN_IF_ERROR(check_fixed_routing(metadata, family));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t hidden,
                           metadata.required("embedding_length", 1, kMaxWidth));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t used,
                           metadata.required("expert_used_count", 1, *num_experts));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t width, expert_width(metadata, *architecture, used));

  MOESAIC_ASSIGN_OR_RETURN(nlohmann::json moe, routing_fields(metadata, family, *architecture));
  MOESAIC_RETURN_IF_ERROR(add_shared(metadata, *architecture, family, &moe));
  moe["num_experts"] = *num_experts;
  moe["num_experts_per_tok"] = used;
  moe[std::string(family.width_fields.names[0])] = width;
  nlohmann::json json = nlohmann::json::object();
  if (family.moe_object.empty()) {
    json = std::move(moe);
  } else {
    moe["moe_normalize_expert_weights"] = 1;
    json[std::string(family.moe_object)] = std::move(moe);
  }
  json["model_type"] = model_type;
  json[std::string(family.hidden_field)] = hidden;
  add_layer_rule(family, &json);
  Result<ModelConfig> config = parse_model_config(json.dump());
  if (!config.ok()) {
    return config.status().with_context(fmt::format("{}: architecture {} as a {} configuration",
                                                    label, architecture->name, model_type));
  }
  // The shared expert's sizes and those of dense layers, in families without them.
  for (const std::string_view name : {"expert_shared_count", "expert_shared_feed_forward_length"}) {
    MOESAIC_RETURN_IF_ERROR(metadata.integer(name, 0, kMaxWidth).status());
  }
  MOESAIC_RETURN_IF_ERROR(metadata.check_unread());
  config->family = &family;
  config->gguf = true;
  config->num_hidden_layers = num_layers;
  std::set<int> layers;
  for (const GgufHeader* header : headers) {
    for (const TensorInfo& tensor : header->tensors) {
      if (is_gguf_moe_tensor(tensor.name)) layers.insert(layer_of(tensor.name, num_layers));
    }
  }
  layers.erase(-1);
  const MoeLayerSpec pattern = config->layers.front();
  config->layers.clear();
  for (const int layer : layers) {
    config->layers.push_back(pattern);
    config->layers.back().layer = layer;
    config->layers.back().prefix = fmt::format("{}{}", kGgufLayerPrefix, layer);
  }
  return config;
}

}  // namespace

bool is_gguf_moe_tensor(std::string_view name) {
  if (!name.starts_with(kGgufLayerPrefix)) return false;
  const std::size_t dot = name.find('.', kGgufLayerPrefix.size());
  if (dot == std::string_view::npos) return false;
  const std::string_view rest = name.substr(dot + 1);
  if (rest.starts_with("exp_probs_b") || rest.starts_with("ffn_gate_inp")) return true;
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
