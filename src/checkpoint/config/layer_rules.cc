#include "checkpoint/config/layer_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/config/config.h"
#include "checkpoint/container/names.h"

namespace moesaic::checkpoint {
namespace {

using LayerList = std::optional<std::vector<bool>>;

// Step-3.5 lists its prediction layers too.
Status check_count(const ConfigFields& fields, std::string_view field, std::size_t entries,
                   std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(const auto predict,
                           fields.integer("num_nextn_predict_layers", {0, kMaxLayers}));
  const auto count = static_cast<std::int64_t>(entries);
  if (count == num_layers || count == num_layers + predict.value_or(0)) return {};
  return fields.bad_value(field, fmt::format("{} entries", count),
                          fmt::format("{} (num_hidden_layers)", num_layers));
}

Result<LayerList> layers_by_type(const ConfigFields& fields, std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(const auto types,
                           fields.strings("mlp_layer_types", static_cast<std::size_t>(kMaxLayers)));
  if (!types) return LayerList();
  MOESAIC_RETURN_IF_ERROR(check_count(fields, "mlp_layer_types", types->size(), num_layers));
  std::vector<bool> is_moe;
  for (const std::string& type : *types) {
    if (type != "sparse" && type != "dense") {
      return Status(
          fields.bad_value("mlp_layer_types", quote_name(type), "\"sparse\" or \"dense\""));
    }
    is_moe.push_back(type == "sparse");
  }
  is_moe.resize(static_cast<std::size_t>(num_layers));
  return LayerList(std::move(is_moe));
}

// A list that spells the choice out per layer; where present it is the whole answer.
Result<LayerList> listed_layers(const ConfigFields& fields, const Family& family,
                                std::int64_t num_layers) {
  LayerList types;
  if (family.has_layer_types) {
    MOESAIC_ASSIGN_OR_RETURN(types, layers_by_type(fields, num_layers));
  }
  if (family.moe_flags_field.empty()) return types;
  MOESAIC_ASSIGN_OR_RETURN(LayerList flags, fields.booleans(family.moe_flags_field,
                                                            static_cast<std::size_t>(kMaxLayers)));
  if (!flags) return types;
  MOESAIC_RETURN_IF_ERROR(check_count(fields, family.moe_flags_field, flags->size(), num_layers));
  flags->resize(static_cast<std::size_t>(num_layers));
  for (std::size_t i = 0; types && i < flags->size(); ++i) {
    if ((*types)[i] == (*flags)[i]) continue;
    return Status(StatusCode::kAmbiguousFormat,
                  fmt::format("{}: mlp_layer_types[{}] is {} but {}[{}] is {}, need lists that "
                              "agree",
                              fields.where(), i, (*types)[i] ? "sparse" : "dense",
                              family.moe_flags_field, i, bool{(*flags)[i]}));
  }
  return flags;
}

Result<std::vector<bool>> sparse_step_layers(const ConfigFields& fields, const Family& family,
                                             std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(const auto step, fields.integer("decoder_sparse_step", {1, kMaxLayers}));
  MOESAIC_ASSIGN_OR_RETURN(
      const auto dense,
      fields.integers("mlp_only_layers", {0, std::max<std::int64_t>(num_layers - 1, 0)},
                      static_cast<std::size_t>(kMaxLayers)));
  std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
  for (std::int64_t i = 0; i < num_layers; ++i) {
    is_moe[static_cast<std::size_t>(i)] =
        (dense || i >= family.default_first_dense) && (i + 1) % step.value_or(1) == 0;
  }
  for (const std::int64_t i : dense.value_or(std::vector<std::int64_t>())) {
    is_moe[static_cast<std::size_t>(i)] = false;
  }
  return is_moe;
}

// moe_layer_freq as a list of 0 and 1.
Result<LayerList> frequency_list(const ConfigFields& fields, std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(const auto list, fields.integers("moe_layer_freq", {0, 1},
                                                            static_cast<std::size_t>(kMaxLayers)));
  if (!list) return LayerList();
  if (static_cast<std::int64_t>(list->size()) != num_layers) {
    return Status(fields.bad_value("moe_layer_freq", fmt::format("{} entries", list->size()),
                                   fmt::format("{} (one per layer)", num_layers)));
  }
  return LayerList(std::vector<bool>(list->begin(), list->end()));
}

Result<std::vector<bool>> first_dense_layers(const ConfigFields& fields, const Family& family,
                                             std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(const auto first,
                           fields.integer(family.first_dense_fields.list(), {0, kMaxLayers}));
  if (!first && family.default_first_dense != 0) {
    MOESAIC_RETURN_IF_ERROR(fields.refuse_null(family.first_dense_fields.list(), "a number", "none",
                                               fmt::to_string(family.default_first_dense)));
    if (!family.first_dense_unsaid.empty()) {
      return fields.refuse_unsaid(family.first_dense_fields.names[0], family.first_dense_unsaid);
    }
  }
  LayerList flags;
  std::int64_t every = 1;
  if (family.has_frequency_list && fields.is_list("moe_layer_freq")) {
    MOESAIC_ASSIGN_OR_RETURN(flags, frequency_list(fields, num_layers));
  } else {
    MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.integer("moe_layer_freq", {1, kMaxLayers}));
    every = stated.value_or(1);
  }
  std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
  for (std::int64_t i = first.value_or(family.default_first_dense); i < num_layers; ++i) {
    const auto at = static_cast<std::size_t>(i);
    is_moe[at] = flags ? (*flags)[at] : i % every == 0;
  }
  return is_moe;
}

Result<std::vector<bool>> periodic_layers(const ConfigFields& fields, std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(const auto period,
                           fields.integer("expert_layer_period", {1, kMaxLayers}));
  MOESAIC_ASSIGN_OR_RETURN(const auto offset,
                           fields.integer("expert_layer_offset", {0, kMaxLayers}));
  std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
  for (std::int64_t i = 0; i < num_layers; ++i) {
    const std::int64_t since = i - offset.value_or(1);
    is_moe[static_cast<std::size_t>(i)] = since % period.value_or(2) == 0;
  }
  return is_moe;
}

Result<std::vector<bool>> interleaved_layers(const ConfigFields& fields, std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(
      const auto listed,
      fields.integers("moe_layers", {0, num_layers - 1}, static_cast<std::size_t>(kMaxLayers)));
  std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
  if (listed) {
    for (const std::int64_t i : *listed) is_moe[static_cast<std::size_t>(i)] = true;
    return is_moe;
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto step,
                           fields.integer("interleave_moe_layer_step", {1, kMaxLayers}));
  for (std::int64_t i = 0; i < num_layers; ++i) {
    is_moe[static_cast<std::size_t>(i)] = (i + 1) % step.value_or(1) == 0;
  }
  return is_moe;
}

Result<std::vector<bool>> interval_layers(const ConfigFields& fields, std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(const auto start,
                           fields.integer("moe_layer_start_index", {0, kMaxLayers}));
  MOESAIC_ASSIGN_OR_RETURN(const auto stated_end,
                           fields.integer("moe_layer_end_index", {-1, kMaxLayers}));
  MOESAIC_ASSIGN_OR_RETURN(const auto interval,
                           fields.integer("moe_layer_interval", {1, kMaxLayers}));
  const std::int64_t end = stated_end.value_or(-1) == -1 ? num_layers - 1 : *stated_end;
  std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
  for (std::int64_t i = start.value_or(1); i <= std::min(end, num_layers - 1); ++i) {
    is_moe[static_cast<std::size_t>(i)] = (i + 1) % interval.value_or(1) == 0;
  }
  return is_moe;
}

std::vector<bool> layers_from(std::int64_t first, std::int64_t num_layers) {
  std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
  for (std::int64_t i = first; i < num_layers; ++i) is_moe[static_cast<std::size_t>(i)] = true;
  return is_moe;
}

Result<std::vector<bool>> listed_frequency_layers(const ConfigFields& fields, const Family& family,
                                                  std::int64_t num_layers) {
  MOESAIC_ASSIGN_OR_RETURN(LayerList flags, frequency_list(fields, num_layers));
  return flags ? std::move(*flags) : layers_from(family.default_first_dense, num_layers);
}

// "4,5,6": numbers and commas, nothing else; or the same numbers as a list.
Result<std::vector<bool>> enumerated_layers(const ConfigFields& fields, const Family& family,
                                            std::int64_t num_layers) {
  if (fields.is_list("moe_layers_enum")) {
    MOESAIC_ASSIGN_OR_RETURN(const auto list,
                             fields.integers("moe_layers_enum", {0, num_layers - 1},
                                             static_cast<std::size_t>(kMaxLayers)));
    std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
    for (const std::int64_t i : *list) is_moe[static_cast<std::size_t>(i)] = true;
    return is_moe;
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto text, fields.string("moe_layers_enum"));
  if (!text) return layers_from(family.default_first_dense, num_layers);
  std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
  std::size_t at = 0;
  while (at < text->size()) {
    const std::size_t comma = std::min(text->find(',', at), text->size());
    std::int64_t layer = -1;
    const char* const end = text->data() + comma;
    const auto [stop, error] = std::from_chars(text->data() + at, end, layer);
    if (error != std::errc() || stop != end || layer < 0 || layer >= num_layers) {
      return Status(
          fields.bad_value("moe_layers_enum", quote_name(*text),
                           fmt::format("numbers from 0 to {} between commas", num_layers - 1)));
    }
    is_moe[static_cast<std::size_t>(layer)] = true;
    at = comma + 1;
  }
  return is_moe;
}

Result<std::vector<bool>> pattern_layers(const ConfigFields& fields, std::int64_t num_layers) {
  std::vector<bool> is_moe(static_cast<std::size_t>(num_layers));
  MOESAIC_ASSIGN_OR_RETURN(
      const auto types, fields.strings("layers_block_type", static_cast<std::size_t>(kMaxLayers)));
  MOESAIC_ASSIGN_OR_RETURN(const auto pattern, fields.string("hybrid_override_pattern"));
  const std::string_view field = types ? "layers_block_type" : "hybrid_override_pattern";
  const std::size_t count = types ? types->size() : pattern ? pattern->size() : 0;
  if (count != is_moe.size()) {
    return Status(fields.bad_value(field, fmt::format("{} entries", count),
                                   fmt::format("{} (one per layer)", num_layers)));
  }
  for (std::size_t i = 0; i < count; ++i) {
    is_moe[i] = types ? (*types)[i] == "moe" : (*pattern)[i] == 'E';
  }
  return is_moe;
}

}  // namespace

Result<std::int64_t> read_num_layers(const ConfigFields& fields, const Family& family) {
  constexpr IntegerRange kRange{1, kMaxLayers};
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.integer(family.num_layers_field, kRange));
  if (stated || family.layer_rule != LayerRule::kPattern) {
    return fields.required_integer(std::span(&family.num_layers_field, 1), kRange);
  }
  MOESAIC_ASSIGN_OR_RETURN(
      const auto types, fields.strings("layers_block_type", static_cast<std::size_t>(kMaxLayers)));
  if (types && !types->empty()) return static_cast<std::int64_t>(types->size());
  MOESAIC_ASSIGN_OR_RETURN(const auto pattern, fields.string("hybrid_override_pattern"));
  if (pattern && !pattern->empty() && pattern->size() <= static_cast<std::size_t>(kMaxLayers)) {
    return static_cast<std::int64_t>(pattern->size());
  }
  return fields.required_integer(std::span(&family.num_layers_field, 1), kRange);
}

Result<std::vector<bool>> hash_layers(const ConfigFields& fields, const Family& family,
                                      std::int64_t num_layers) {
  std::vector<bool> is_hash(static_cast<std::size_t>(num_layers));
  if (family.hash_table.empty()) return is_hash;
  MOESAIC_ASSIGN_OR_RETURN(const auto types,
                           fields.strings("mlp_layer_types", static_cast<std::size_t>(kMaxLayers)));
  constexpr std::string_view kCount = "num_hash_layers";
  MOESAIC_ASSIGN_OR_RETURN(const auto count, fields.integer(kCount, {0, kMaxLayers}));
  if (!types && !count && family.default_hash_layers != 0) {
    MOESAIC_RETURN_IF_ERROR(fields.refuse_null(std::span(&kCount, 1), "a number", "none",
                                               fmt::to_string(family.default_hash_layers)));
  }
  if (types && static_cast<std::int64_t>(types->size()) != num_layers) {
    return Status(fields.bad_value("mlp_layer_types", fmt::format("{} entries", types->size()),
                                   fmt::format("{} (num_hidden_layers)", num_layers)));
  }
  for (std::size_t i = 0; i < is_hash.size(); ++i) {
    is_hash[i] = static_cast<std::int64_t>(i) < count.value_or(family.default_hash_layers);
    if (!types) continue;
    const std::string& type = (*types)[i];
    if (type != "moe" && type != "hash_moe") {
      return Status(
          fields.bad_value("mlp_layer_types", quote_name(type), "\"moe\" or \"hash_moe\""));
    }
    is_hash[i] = type == "hash_moe";
  }
  return is_hash;
}

Result<std::vector<bool>> moe_layers(const ConfigFields& fields, const Family& family,
                                     std::int64_t num_layers) {
  if (!family.hash_table.empty()) {  // its list says how a layer routes: all are MoE
    return std::vector<bool>(static_cast<std::size_t>(num_layers), true);
  }
  MOESAIC_ASSIGN_OR_RETURN(auto listed, listed_layers(fields, family, num_layers));
  if (listed) return std::move(*listed);
  switch (family.layer_rule) {
    case LayerRule::kSparseStep:
      return sparse_step_layers(fields, family, num_layers);
    case LayerRule::kFirstDense:
      return first_dense_layers(fields, family, num_layers);
    case LayerRule::kPeriod:
      return periodic_layers(fields, num_layers);
    case LayerRule::kInterleave:
      return interleaved_layers(fields, num_layers);
    case LayerRule::kInterval:
      return interval_layers(fields, num_layers);
    case LayerRule::kEnumerated:
      return enumerated_layers(fields, family, num_layers);
    case LayerRule::kListed:
      return listed_frequency_layers(fields, family, num_layers);
    case LayerRule::kPattern:
      return pattern_layers(fields, num_layers);
    case LayerRule::kEvery:
      break;
  }
  return std::vector<bool>(static_cast<std::size_t>(num_layers), true);
}

}  // namespace moesaic::checkpoint
