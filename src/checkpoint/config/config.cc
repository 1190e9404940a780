#include "checkpoint/config/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/config/activation_config.h"
#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/language_model.h"
#include "checkpoint/config/layer_rules.h"
#include "checkpoint/config/python_constants.h"
#include "checkpoint/config/refused_families.h"
#include "checkpoint/config/routing_config.h"
#include "checkpoint/config/unread_fields.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "core/nearest_name.h"
#include "moesaic/activation.h"

namespace moesaic::checkpoint {
namespace {

constexpr IntegerRange kWidthRange{1, kMaxWidth};

// --- which family ---------------------------------------------------------------------------------

Result<const Family*> require_family(const LanguageModel& model) {
  const std::string& type = model.model_type;
  if (type.empty()) {
    return Status(StatusCode::kCorruptFile,
                  model.where + ": model_type: missing, need the name of a model family");
  }
  if (const RefusedFamily* refused = find_refused_family(type); refused != nullptr) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: model_type: got {}, which is not supported: {}", model.where,
                              quote_name(type), refused->reason));
  }
  const Family* family = find_family(type);
  if (family != nullptr) return family;
  const std::vector<std::string_view> known = known_model_types();
  std::string text = fmt::format("{}: model_type: got {}, which is not supported; known are {}",
                                 model.where, quote_name(type), fmt::join(known, ", "));
  text += fmt::format("; nearest is {}", nearest_name(type, known));
  return Status(StatusCode::kUnsupported, std::move(text));
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

// How many shared experts: null says "none", a missing field "the family's default".
Result<std::int64_t> read_shared_count(const ConfigFields& fields, const Family& family) {
  if (family.shared_count_field.empty()) return 1;
  const std::array both = {family.shared_count_field, family.shared_count_alias};
  const auto names = std::span(both).first(family.shared_count_alias.empty() ? 1 : 2);
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.integer(names, {0, 1024}));
  if (stated) return *stated;
  if (std::any_of(names.begin(), names.end(),
                  [&](std::string_view name) { return fields.is_null(name); })) {
    return 0;
  }
  if (family.shared_unsaid.empty()) return family.default_shared_count;
  return Status(StatusCode::kAmbiguousFormat,
                fmt::format("{}: {}: missing, need a number in {} models (0: none), since "
                            "implementations disagree: {}",
                            fields.where(), names[0], family.title, family.shared_unsaid));
}

// A second name of the routed width that some read as the shared experts' width.
Status check_repeated_width(const ConfigFields& fields, const Family& family, std::int64_t count,
                            std::int64_t expert_width) {
  const std::string_view field = family.shared_repeated_width;
  if (field.empty()) return {};
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.integer(field, {0, kMaxWidth}));
  if (!stated || (count == 1 && *stated == expert_width)) return {};
  return {StatusCode::kAmbiguousFormat,
          fmt::format("{}: {}: got {} with {} shared experts, need {} with 1, since "
                      "implementations disagree: transformers ignores it, others take it as the "
                      "width of all of them or of each",
                      fields.where(), field, *stated, count, expert_width)};
}

Result<SharedExpertSpec> read_shared(const ConfigFields& fields, const Family& family,
                                     std::int64_t expert_width) {
  SharedExpertSpec shared;
  if (family.shared == SharedRule::kNone) return shared;
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, read_shared_count(fields, family));
  MOESAIC_RETURN_IF_ERROR(check_repeated_width(fields, family, count, expert_width));
  if (!family.shared_sum_field.empty()) {
    MOESAIC_ASSIGN_OR_RETURN(const auto way, fields.string(family.shared_sum_field));
    if (count > 0 && way.value_or("") != "sum" && !MOESAIC_FAULT(checkpoint_accept_other_sums)) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("{}: {}: got {}, need \"sum\"", fields.where(),
                                family.shared_sum_field, way ? quote_name(*way) : "none"));
    }
  }
  std::int64_t width = expert_width;
  if (family.shared == SharedRule::kOwnWidth) {
    // A width of 0 says "none" as well, where nothing else belongs to the shared expert.
    const IntegerRange range{family.shared_gate.empty() ? 0 : 1, kMaxWidth};
    const std::array both = {family.shared_width_field, family.shared_width_alias};
    const auto names = std::span(both).first(family.shared_width_alias.empty() ? 1 : 2);
    width = family.default_shared_width;
    MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.integer(names, range));
    if (stated) width = *stated;
    if (!stated && width == 0 && count > 0) {
      MOESAIC_ASSIGN_OR_RETURN(width, fields.required_integer(names, range));
    }
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
  if (!family.width_alias.empty()) {
    const std::array both = {family.width_fields.names[0], family.width_alias};
    return fields.required_integer(both, kWidthRange);
  }
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
  // Jamba builds its layers from their numbers of experts, of which 1 means an MLP.
  if (count) return *count > (family.layer_rule == LayerRule::kPeriod ? 1 : 0);
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
    if (count.ok() && *count) return fmt::format("{}: got {}", name, **count);
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
  MOESAIC_ASSIGN_OR_RETURN(config.family, require_family(model));
  config.model_type = model.model_type;
  MOESAIC_ASSIGN_OR_RETURN(config.quant, parse_quant_config(holders_of(top, model)));
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

Status no_such_layer(const ModelConfig& config, int index) {
  std::string list;
  for (const MoeLayerSpec& spec : config.layers) {
    if (list.size() > 200) {  // a longer list would not be read
      list += fmt::format(" ... {}", config.layers.back().layer);
      break;
    }
    list += fmt::format("{}{}", list.empty() ? "" : ", ", spec.layer);
  }
  return {StatusCode::kNotFound, fmt::format("layer: got {}, need one of the MoE layers: {}", index,
                                             list.empty() ? "none" : list)};
}

}  // namespace moesaic::checkpoint
