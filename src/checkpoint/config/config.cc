#include "checkpoint/config/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/config/activation_config.h"
#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/layer_rules.h"
#include "checkpoint/config/python_constants.h"
#include "checkpoint/config/refused_families.h"
#include "checkpoint/config/routing_config.h"
#include "checkpoint/config/unread_fields.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "moesaic/activation.h"

namespace moesaic::checkpoint {
namespace {

constexpr IntegerRange kWidthRange{1, kMaxWidth};

// --- which object, which family ----------------------------------------------------------------

struct LanguageModel {
  const nlohmann::json* object;
  const nlohmann::json* nested;  // text_config, when that is the object
  std::string where;
};

// Multimodal wrappers nest the language model under text_config; models that also speak nest both
// of it under thinker_config.
Result<LanguageModel> find_language_model(const nlohmann::json& top) {
  LanguageModel found{&top, nullptr, "config.json"};
  for (const std::string_view name : {"thinker_config", "text_config"}) {
    const ConfigFields fields(*found.object, found.where);
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* nested, fields.object(name));
    if (nested != nullptr) found = {nested, nested, fmt::format("{}: {}", found.where, name)};
  }
  return found;
}

Result<const Family*> require_family(const ConfigFields& fields, std::string* model_type) {
  MOESAIC_ASSIGN_OR_RETURN(auto type, fields.string("model_type"));
  if (!type) {
    return Status(StatusCode::kCorruptFile,
                  fields.where() + ": model_type: missing, need the name of a model family");
  }
  const Family* family = find_family(*type);
  if (const RefusedFamily* refused = find_refused_family(*type); refused != nullptr) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: model_type: got {}, which is not supported: {}", fields.where(),
                              quote_name(*type), refused->reason));
  }
  if (family == nullptr) {
    const std::vector<std::string_view> known = known_model_types();
    std::string text = fmt::format("{}: model_type: got {}, which is not supported; known are {}",
                                   fields.where(), quote_name(*type), fmt::join(known, ", "));
    const std::string nearest = similar_name(*type, known);
    if (!nearest.empty()) text += fmt::format("; nearest is {}", nearest);
    return Status(StatusCode::kUnsupported, std::move(text));
  }
  *model_type = std::move(*type);
  return family;
}

// --- parts of a layer ---------------------------------------------------------------------------

Result<std::optional<DType>> stated_dtype(const ConfigFields& fields) {
  std::optional<DType> result;
  for (const std::string_view name : {"dtype", "torch_dtype"}) {
    MOESAIC_ASSIGN_OR_RETURN(const auto text, fields.string(name));
    if (!text) continue;
    std::string_view word = *text;
    if (word.starts_with("torch.")) word.remove_prefix(6);
    std::optional<DType> dtype;
    if (word == "bfloat16") dtype = DType::kBF16;
    if (word == "float16") dtype = DType::kF16;
    if (word == "float32") dtype = DType::kF32;
    if (!dtype) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("{}: {}: got {}, need bfloat16, float16 or float32", fields.where(),
                                name, quote_name(*text)));
    }
    if (result && *result != *dtype) {
      return Status(StatusCode::kAmbiguousFormat,
                    fmt::format("{}: dtype is {} but torch_dtype is {}", fields.where(),
                                dtype_name(*result), dtype_name(*dtype)));
    }
    result = dtype;
  }
  return result;
}

Result<SharedExpertSpec> read_shared(const ConfigFields& fields, const Family& family,
                                     std::int64_t expert_width) {
  SharedExpertSpec shared;
  if (family.shared == SharedRule::kNone) return shared;
  std::int64_t count = 1;
  if (!family.shared_count_field.empty()) {
    // null says "none"; a missing field says "the family's default".
    const std::int64_t unsaid =
        fields.is_null(family.shared_count_field) ? 0 : family.default_shared_count;
    MOESAIC_ASSIGN_OR_RETURN(const auto stated,
                             fields.integer(family.shared_count_field, {0, 1024}));
    count = stated.value_or(unsaid);
  }
  if (!family.shared_sum_field.empty()) {
    MOESAIC_ASSIGN_OR_RETURN(const auto way, fields.string(family.shared_sum_field));
    if (count > 0 && way.value_or("") != "sum" && !MOESAIC_FAULT(checkpoint_accept_other_sums)) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("{}: {}: got {}, need \"sum\"", fields.where(),
                                family.shared_sum_field, way ? quote_name(*way) : "none"));
    }
  }
  std::int64_t width = expert_width;
  if (family.shared == SharedRule::kOwnWidth && count > 0) {
    // A width of 0 says "none" as well, where nothing else belongs to the shared expert.
    const IntegerRange range{family.shared_gate.empty() ? 0 : 1, kMaxWidth};
    const std::array names = {family.shared_width_field, family.shared_width_alias};
    const std::size_t count_names = family.shared_width_alias.empty() ? 1 : 2;
    MOESAIC_ASSIGN_OR_RETURN(width,
                             fields.required_integer(std::span(names).first(count_names), range));
  }
  shared.intermediate_size = count * width;
  shared.beside_block = shared.intermediate_size > 0 && family.shared_beside_block;
  shared.gated_output = shared.intermediate_size > 0 && !family.shared_gate.empty();
  if (shared.intermediate_size > 0 && family.shared_unlimited) {
    shared.activation.emplace().kind = family.activation.kind;
  }
  if (shared.intermediate_size > 0 && !family.shared_step_limits.empty()) {
    MOESAIC_ASSIGN_OR_RETURN(shared.activation,
                             read_step_limit(fields, family.shared_step_limits, family.activation));
  }
  return shared;
}

Status read_input_norm(const ConfigFields& fields, const Family& family, MoeLayerSpec* spec) {
  if (!family.input_norm.present()) return {};
  MOESAIC_ASSIGN_OR_RETURN(const auto eps, fields.number(family.input_norm.eps_field));
  spec->input_norm_eps = eps.value_or(family.input_norm.default_eps);
  if (!(spec->input_norm_eps > 0)) {
    return fields.bad_value(family.input_norm.eps_field, fmt::to_string(*eps), "> 0");
  }
  return {};
}

// The first of the family's names for I that the file has: Hunyuan's second name is also that of
// the dense layers. Families with one name refuse contradictions as for every alias.
Result<std::int64_t> read_width(const ConfigFields& fields, const Family& family) {
  for (const std::string_view& name : family.width_fields.list()) {
    MOESAIC_ASSIGN_OR_RETURN(const auto width, fields.integer(name, kWidthRange));
    if (width) return *width;
  }
  return fields.required_integer(family.width_fields.list(), kWidthRange);  // says what is missing
}

// One MoE layer; `fields` are the model's, or, in families that nest them, `moe` the experts'.
Result<MoeLayerSpec> read_layer(const ConfigFields& fields, const ConfigFields& moe,
                                ModelConfig* config) {
  const Family& family = *config->family;
  MoeLayerSpec spec;
  spec.model_type = config->model_type;
  MOESAIC_ASSIGN_OR_RETURN(
      spec.hidden_size, fields.required_integer(std::span(&family.hidden_field, 1), kWidthRange));
  MOESAIC_ASSIGN_OR_RETURN(spec.intermediate_size, read_width(moe, family));
  MOESAIC_ASSIGN_OR_RETURN(spec.num_experts,
                           moe.required_integer(expert_count_fields(), {1, kMaxExperts}));
  MOESAIC_ASSIGN_OR_RETURN(spec.routing,
                           read_routing(moe, family, spec.num_experts, &config->bias_by_presence));
  MOESAIC_ASSIGN_OR_RETURN(spec.activation, read_activation(moe, family));
  if (!family.step_limits.empty()) {
    MOESAIC_ASSIGN_OR_RETURN(spec.activation,
                             read_step_limit(moe, family.step_limits, spec.activation));
  }
  MOESAIC_RETURN_IF_ERROR(read_input_norm(moe, family, &spec));
  MOESAIC_ASSIGN_OR_RETURN(spec.shared, read_shared(moe, family, spec.intermediate_size));
  spec.activation_dtype = config->stated_dtype.value_or(DType::kBF16);
  spec.has_router_bias = !family.gate_bias.empty();
  spec.has_expert_bias = !family.layouts[0].bias_suffix.empty();
  spec.apply_router_weight_on_input = family.routing.weight_on_input;
  MOESAIC_ASSIGN_OR_RETURN(spec.quant, linear_scheme(config->quant.linear, spec.activation_dtype));
  return spec;
}

// DeepSeek-V4's first layers: experts by token id, weights from the scores.
Status use_hash_table(const ConfigFields& fields, MoeLayerSpec* spec) {
  constexpr std::string_view kVocabulary = "vocab_size";
  MOESAIC_ASSIGN_OR_RETURN(spec->hash_vocabulary,
                           fields.required_integer(std::span(&kVocabulary, 1), kWidthRange));
  spec->routing.method = RoutingMethod::kHash;
  spec->routing.has_correction_bias = false;
  return {};
}

// A dense member of a family that also has MoE models says so by having no experts.
Result<bool> has_experts(const ConfigFields& fields, const Family& family) {
  if (!family.switch_field.empty()) {
    MOESAIC_ASSIGN_OR_RETURN(const auto on, fields.boolean(family.switch_field));
    return on.value_or(false);
  }
  if (family.layer_rule == LayerRule::kPattern || !family.moe_object.empty()) return true;
  MOESAIC_ASSIGN_OR_RETURN(const auto count,
                           fields.integer(expert_count_fields(), {0, kMaxExperts}));
  if (count) return *count > 0;
  if (family.layer_rule == LayerRule::kEvery) return true;
  const std::span<const std::string_view> names = expert_count_fields();
  // null is the way to say "dense"; a field that is not there at all is an incomplete file.
  return std::none_of(names.begin(), names.end(),
                      [&](std::string_view name) { return fields.is_null(name); });
}

// The field in which a model without experts says so.
std::string said_dense(const ConfigFields& fields) {
  for (const std::string_view name : expert_count_fields()) {
    if (fields.is_null(name)) return fmt::format("{}: got null", name);
    const auto count = fields.integer(name, {0, kMaxExperts});
    if (count.ok() && *count == std::int64_t{0}) return fmt::format("{}: got 0", name);
  }
  return {};
}

Result<ModelConfig> parse_checked(std::string_view text) {
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json top,
                           parse_json_document("config.json", quote_python_constants(text),
                                               {kMaxConfigBytes, kMaxConfigDepth}));
  if (!top.is_object()) {
    return Status(StatusCode::kCorruptFile, "config.json: need an object at the top");
  }
  MOESAIC_ASSIGN_OR_RETURN(const LanguageModel model, find_language_model(top));
  FieldsRead read;
  FieldsRead moe_read;
  const ConfigFields fields(*model.object, model.where, -1, &read);

  ModelConfig config;
  MOESAIC_ASSIGN_OR_RETURN(config.family, require_family(fields, &config.model_type));
  MOESAIC_ASSIGN_OR_RETURN(config.quant, parse_quant_config(top, model.nested));
  MOESAIC_ASSIGN_OR_RETURN(config.stated_dtype, stated_dtype(fields));
  if (!config.stated_dtype && model.nested != nullptr) {
    MOESAIC_ASSIGN_OR_RETURN(config.stated_dtype, stated_dtype(ConfigFields(top, "config.json")));
  }
  MOESAIC_ASSIGN_OR_RETURN(config.num_hidden_layers, read_num_layers(fields, *config.family));
  MOESAIC_ASSIGN_OR_RETURN(const bool is_moe_model, has_experts(fields, *config.family));
  if (!is_moe_model) {
    if (config.family->switch_field.empty()) config.no_experts = said_dense(fields);
    return config;
  }

  MOESAIC_ASSIGN_OR_RETURN(const std::vector<bool> is_moe,
                           moe_layers(fields, *config.family, config.num_hidden_layers));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<bool> is_hash,
                           hash_layers(fields, *config.family, config.num_hidden_layers));
  const nlohmann::json* moe_object = model.object;
  std::string moe_where = model.where;
  if (!config.family->moe_object.empty()) {
    moe_where += fmt::format(": {}", config.family->moe_object);
    MOESAIC_ASSIGN_OR_RETURN(moe_object, fields.object(config.family->moe_object));
    if (moe_object == nullptr) {
      return Status(StatusCode::kCorruptFile,
                    moe_where + ": missing, need the object with the experts' fields");
    }
  }
  std::optional<MoeLayerSpec> spec;
  for (std::size_t i = 0; i < is_moe.size(); ++i) {
    if (!is_moe[i]) continue;
    if (!spec || config.family->has_layer_lists) {
      const std::int64_t layer =
          config.family->has_layer_lists ? static_cast<std::int64_t>(i) : std::int64_t{-1};
      MOESAIC_ASSIGN_OR_RETURN(
          spec,
          read_layer(fields, ConfigFields(*moe_object, moe_where, layer, &moe_read), &config));
      const Status valid = validate(*spec);
      if (!valid.ok()) return valid.with_context(model.where);
    }
    spec->layer = static_cast<int>(i);
    spec->prefix = block_name(config.family->layer_prefix, static_cast<std::int64_t>(i),
                              config.family->layouts[0].block);
    config.layers.push_back(*spec);
    if (is_hash[i] && !MOESAIC_FAULT(checkpoint_hash_layers_by_score)) {
      MOESAIC_RETURN_IF_ERROR(use_hash_table(fields, &config.layers.back()));
    }
  }
  // A model without MoE layers: its fields about experts are checked all the same.
  if (!spec) {
    const ConfigFields moe(*moe_object, moe_where, -1, &moe_read);
    MOESAIC_RETURN_IF_ERROR(read_layer(fields, moe, &config).status());
  }
  if (moe_object == model.object) {
    moe_read.merge(read);
    MOESAIC_RETURN_IF_ERROR(
        check_unread_fields(*model.object, model.where, *config.family, moe_read));
    return config;
  }
  MOESAIC_RETURN_IF_ERROR(check_unread_fields(*model.object, model.where, *config.family, read));
  MOESAIC_RETURN_IF_ERROR(check_unread_fields(*moe_object, moe_where, *config.family, moe_read));
  return config;
}

}  // namespace

Result<ModelConfig> parse_model_config(std::string_view json) {
  return guard_allocation("config.json", [&] { return parse_checked(json); });
}

}  // namespace moesaic::checkpoint
