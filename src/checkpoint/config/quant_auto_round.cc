// quantization_config of AutoRound's own format, whose linears lie as GPTQ or AWQ packs them.
// Source: AutoRound's exporter, and what vLLM reads of it.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/config/quant_methods.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::string_view kGptq = "gptq", kAwq = "awq", kIntegers = "int";
constexpr std::int64_t kPlainBits = 16;  // and more: not quantised

// kGptq or kAwq. Early files have the packing in front of a kernel's name, as "backend".
Result<std::string_view> read_packing(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const auto backend, fields.string("backend"));
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.string("packing_format"));
  std::string packing = lower_case(stated.value_or("auto_round:auto_gptq"));
  const std::string engine = lower_case(backend.value_or(""));
  const bool early = !stated && engine.starts_with("auto_round");
  if (early) packing = engine;
  for (const std::string_view kind : {kGptq, kAwq}) {
    const std::string own = fmt::format("auto_round:{}", kind);
    if (packing == own || packing == fmt::format("auto_round:auto_{}", kind)) return kind;
    if (early && packing.starts_with(own + ":")) return kind;
  }
  return fields.unsupported(
      fmt::format("{}: got {}, need auto_round:auto_gptq or auto_round:auto_awq",
                  early ? "backend" : "packing_format", quote_name(packing)));
}

// What is done beside packing weights, which reading these alone would leave out.
Status refuse_other_steps(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const auto act_bits, fields.integer("act_bits", {1, 64}));
  if (act_bits && *act_bits < kPlainBits) {
    return fields.unsupported(
        fmt::format("act_bits: got {}, need {} or no field", *act_bits, kPlainBits));
  }
  for (const std::string_view field : {"transform_config", "rotation_config"}) {
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* object, fields.object(field));
    if (object == nullptr || object->empty()) continue;
    return fields.unsupported(fmt::format("{} is not supported, need none", field));
  }
  return {};
}

// A key of extra_config is searched for in names as a regular expression, unless it is a linear's name.
// Without an expression's signs a key is taken for a part of names ("mlp.experts"), whole ones too:
// that one linear's name is a part of another's ("mlp.gate", "mlp.gate_proj") decides about no expert.
bool is_expression(std::string_view key) {
  return key.find_first_of("*+?^$()[]{}|\\") != std::string_view::npos || key.starts_with("re:");
}

constexpr std::string_view kExtraConfig = "extra_config";

// Its entries; null: none.
Result<const nlohmann::json*> extra_entries(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* extra, fields.object(kExtraConfig));
  if (extra == nullptr || extra->empty() || MOESAIC_FAULT(checkpoint_extra_config_is_ignored)) {
    return nullptr;
  }
  MOESAIC_RETURN_IF_ERROR(check_entry_count(fields, kExtraConfig, extra->size()));
  return extra;
}

// One entry: of an expression among the overrides, else by its name.
void add_entry(const ConfigFields& fields, const std::string& key, nlohmann::json values,
               bool plain, QuantConfig* quant) {
  const auto type = values.find("data_type");
  if (type != values.end() && *type == std::string(kIntegers)) values.erase(type);
  std::string difference = fields.difference_of(values);
  if (is_expression(key)) {
    // As an expression that matches from a name's start.
    quant->overrides.push_back(
        {key, fmt::format(".*(?:{})", key), std::move(difference), kExtraConfig, plain});
  } else {
    quant->named[key] = {std::move(difference), plain};
  }
}

// Modules that are described otherwise than the rest: left out, with 16 bits, or not supported
// where they are experts.
Status read_extra(const ConfigFields& fields, QuantConfig* quant) {
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* extra, extra_entries(fields));
  if (extra == nullptr) return {};
  if (!quant->skips.empty() || !quant->overrides.empty()) {
    return fields.unsupported(
        fmt::format("{} beside modules_to_not_convert or dynamic, need one of them", kExtraConfig));
  }
  quant->rule = NameRule::kTextOrRegex;
  const ConfigFields entries(*extra, fmt::format("{}: {}", fields.where(), kExtraConfig));
  for (const auto& [key, value] : extra->items()) {
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* values, entries.object(key));
    if (values == nullptr) continue;
    const ConfigFields module(*values, fmt::format("{}: {}", entries.where(), quote_name(key)));
    MOESAIC_ASSIGN_OR_RETURN(const auto bits, module.integer("bits", {1, 64}));
    const bool plain = bits && *bits >= kPlainBits;
    if (plain && is_expression(key)) {
      quant->skips.push_back(fmt::format("re:.*(?:{})", key));
    } else {
      add_entry(fields, key, *values, plain, quant);
    }
  }
  return {};
}

// The blocks whose linears are quantised: one text with commas, or a list (also of lists). The first name
// is today's; a file has one of them.
Status read_blocks(const ConfigFields& fields, QuantConfig* quant) {
  constexpr std::array<std::string_view, 2> kFields = {"block_name_to_quantize",
                                                       "to_quant_block_names"};
  for (const std::string_view field : kFields) {
    std::vector<std::string> names;
    if (fields.is_list(field)) {
      MOESAIC_ASSIGN_OR_RETURN(auto list, fields.nested_strings(field, kMaxSkipEntries));
      names = std::move(*list);
      if (names.empty()) return fields.bad_value(field, "[]", "names of blocks, or no field");
    } else {
      MOESAIC_ASSIGN_OR_RETURN(const auto text, fields.string(field));
      if (!text) continue;
      for (std::size_t begin = 0; begin <= text->size();) {
        const std::size_t end = std::min(text->find(',', begin), text->size());
        names.push_back(text->substr(begin, end - begin));
        begin = end + 1;
      }
    }
    MOESAIC_RETURN_IF_ERROR(check_entry_count(fields, field, names.size()));
    for (std::string& name : names) {
      // Its writer takes blanks behind commas for none, too.
      const std::size_t first = name.find_first_not_of(' ');
      if (first == name.npos) return fields.bad_value(field, quote_name(name), "names of blocks");
      name = name.substr(first, name.find_last_not_of(' ') + 1 - first);
    }
    quant->blocks = std::move(names);
    return {};
  }
  return {};
}

// Whether zero points are stored is said twice, and AutoRound's own word is the first.
Status check_zero_point(const ConfigFields& fields, bool symmetric) {
  MOESAIC_ASSIGN_OR_RETURN(const auto zero_point, fields.boolean("zero_point"));
  if (!zero_point || *zero_point != symmetric || MOESAIC_FAULT(checkpoint_sym_wins)) return {};
  return {StatusCode::kAmbiguousFormat,
          fmt::format("{}: sym is {}, and so is zero_point, need one of them true", fields.where(),
                      symmetric)};
}

}  // namespace

Status check_extra_config(const ConfigFields& fields, QuantConfig* quant) {
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* extra, extra_entries(fields));
  if (extra == nullptr || MOESAIC_FAULT(checkpoint_foreign_extra_config)) return {};
  const ConfigFields entries(*extra, fmt::format("{}: {}", fields.where(), kExtraConfig));
  for (const auto& [key, value] : extra->items()) {
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* values, entries.object(key));
    if (values == nullptr) continue;
    const auto bits = values->find("bits");
    const bool plain = bits != values->end() && bits->is_number_integer() && *bits >= kPlainBits &&
                       !MOESAIC_FAULT(checkpoint_extra_config_contradicts_lists);
    add_entry(fields, key, *values, plain, quant);
  }
  return {};
}

Result<QuantConfig> parse_auto_round(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const std::string_view packing, read_packing(fields));
  MOESAIC_ASSIGN_OR_RETURN(const auto type, fields.string("data_type"));
  if (type && *type != kIntegers) {
    return fields.unsupported(
        fmt::format("data_type: got {}, need \"{}\"", quote_name(*type), kIntegers));
  }
  MOESAIC_RETURN_IF_ERROR(refuse_other_steps(fields));
  MOESAIC_ASSIGN_OR_RETURN(const auto symmetric, fields.boolean("sym"));
  QuantConfig quant;
  if (packing == kGptq) {
    MOESAIC_ASSIGN_OR_RETURN(quant, parse_gptq(fields));
    if (quant.linear.zero_points) {
      return fields.unsupported(
          "sym: got false in the packing of GPTQ, need true or the packing of AWQ: writers differ "
          "in whether a stored zero point is one less");
    }
  } else {
    MOESAIC_ASSIGN_OR_RETURN(quant, parse_awq(fields));
    MOESAIC_RETURN_IF_ERROR(check_zero_point(fields, symmetric.value_or(true)));
    quant.linear.zero_points = !symmetric.value_or(true);
  }
  MOESAIC_RETURN_IF_ERROR(read_extra(fields, &quant));
  MOESAIC_RETURN_IF_ERROR(read_blocks(fields, &quant));
  return quant;
}

}  // namespace moesaic::checkpoint
