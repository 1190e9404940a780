#include "checkpoint/config/quant_methods.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>

#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "quant/bnb.h"

namespace moesaic::checkpoint {
namespace {

constexpr IntegerRange kBitsRange{1, 16};
constexpr IntegerRange kGroupRange{-1, 1 << 20};

Result<int> required_bits(const ConfigFields& fields, ConfigFields::Names names,
                          std::initializer_list<int> known) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bits, fields.required_integer(names, kBitsRange));
  if (std::find(known.begin(), known.end(), bits) != known.end()) return static_cast<int>(bits);
  return fields.unsupported(
      fmt::format("{}: got {}, need {}", names[0], bits, fmt::join(known, " or ")));
}

// -1 (one group) or at least 8 columns.
Result<std::int64_t> required_group(const ConfigFields& fields, ConfigFields::Names names) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t group, fields.required_integer(names, kGroupRange));
  if (group == -1 || (group >= 8 && group % 8 == 0)) return group;
  return fields.bad_value(names[0], fmt::to_string(group), "-1 or a multiple of 8");
}

// "dynamic" of GPTQ, and of AWQ by GPTQModel: keys are regular expressions, "-:" leaves modules out,
// the others ("+:" or no mark) override what the values say. Whether that concerns experts is known
// with their names.
Status read_dynamic(const ConfigFields& fields, QuantConfig* quant) {
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* dynamic, fields.object("dynamic"));
  if (dynamic == nullptr) return {};
  MOESAIC_RETURN_IF_ERROR(check_entry_count(fields, "dynamic", dynamic->size()));
  const ConfigFields entries(*dynamic, fields.where() + ": dynamic");
  for (const auto& [key, value] : dynamic->items()) {
    if (key.starts_with("-:")) {
      quant->rule = NameRule::kExactOrRegex;
      quant->skips.push_back("re:" + key.substr(2));
      continue;
    }
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* values, entries.object(key));
    quant->overrides.push_back({key, key.substr(key.starts_with("+:") ? 2 : 0),
                                values == nullptr ? "" : fields.difference_of(*values)});
  }
  return {};
}

// The way of packing, which has two names; GPTQModel and transformers write both.
Result<std::optional<std::string>> packing_of(const ConfigFields& fields, std::string_view name) {
  constexpr std::string_view kOther = "format";
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.string(name));
  MOESAIC_ASSIGN_OR_RETURN(const auto other, fields.string(kOther));
  if (MOESAIC_FAULT(checkpoint_one_name_of_packing)) return stated;
  if (stated && other && lower_case(*stated) != lower_case(*other)) {
    return Status(StatusCode::kAmbiguousFormat,
                  fmt::format("{}: {} is {}, but {} {}, need one of them", fields.where(), name,
                              quote_name(*stated), kOther, quote_name(*other)));
  }
  return stated ? stated : other;
}

// What GPTQModel does to activations beside packing weights, which reading these alone would leave
// out.
Status refuse_activation_steps(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const auto rotation, fields.string("rotation"));
  if (rotation && !MOESAIC_FAULT(checkpoint_rotation_is_ignored)) {
    return fields.unsupported(
        fmt::format("rotation {} is not supported, need none", quote_name(*rotation)));
  }
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* activation, fields.object("activation"));
  if (activation == nullptr || activation->empty()) return {};
  return fields.unsupported("activation is not supported, need none");
}

// GPTQ's list of the linears of a block that are quantised: parts of their names.
Status read_quantized_modules(const ConfigFields& fields, QuantConfig* quant) {
  constexpr std::string_view kField = "modules_in_block_to_quantize";
  MOESAIC_ASSIGN_OR_RETURN(auto names, fields.nested_strings(kField, kMaxSkipEntries));
  if (!names) return {};
  const bool empty = std::any_of(names->begin(), names->end(),
                                 [](const std::string& name) { return name.empty(); });
  if (empty) return fields.bad_value(kField, quote_name(""), "parts of modules' names");
  quant->only = std::move(*names);
  return {};
}

// "model.layers.0." as people write it for a substring test: parts are compared whole, so the dot
// says nothing more.
std::string without_outer_dots(const std::string& entry) {
  const std::size_t first = entry.find_first_not_of('.');
  if (first == std::string::npos) return {};
  return entry.substr(first, entry.find_last_not_of('.') + 1 - first);
}

// Which modules are left out, by name or by GPTQModel's rules.
Status read_left_out(const ConfigFields& fields, QuantConfig* quant) {
  MOESAIC_RETURN_IF_ERROR(append_skips(fields, "modules_to_not_convert", false, quant));
  const bool listed = !quant->skips.empty();
  MOESAIC_RETURN_IF_ERROR(read_dynamic(fields, quant));
  if (!listed || quant->rule == NameRule::kParts) return {};
  return fields.unsupported("dynamic beside modules_to_not_convert, need one of them");
}

}  // namespace

std::string lower_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

Status check_entry_count(const ConfigFields& fields, std::string_view object, std::size_t entries) {
  if (entries <= kMaxSkipEntries) return {};
  return {StatusCode::kLimitExceeded,
          fmt::format("{}: {}: got {} entries, need at most {}", fields.where(), object, entries,
                      kMaxSkipEntries)};
}

Status append_skips(const ConfigFields& fields, std::string_view list, bool regex_allowed,
                    QuantConfig* quant) {
  MOESAIC_ASSIGN_OR_RETURN(auto entries, fields.strings(list, kMaxSkipEntries));
  if (!entries) return {};
  for (const std::string& entry : *entries) {
    if (entry.starts_with("re:") && !regex_allowed) {
      return fields.unsupported(
          fmt::format("{}: regular expression {} is not supported with this "
                      "quant_method, need module names",
                      list, quote_name(entry)));
    }
    std::string name = quant->rule == NameRule::kParts ? without_outer_dots(entry) : entry;
    if (name.empty()) return fields.bad_value(list, quote_name(entry), "module names");
    quant->skips.push_back(std::move(name));
  }
  return {};
}

Result<QuantConfig> parse_gptq(const ConfigFields& fields) {
  QuantConfig quant;
  LinearFormat& f = quant.linear;
  f.stored = StoredFormat::kGptq;
  constexpr std::array<std::string_view, 1> kBits = {"bits"};
  constexpr std::array<std::string_view, 1> kGroup = {"group_size"};
  MOESAIC_ASSIGN_OR_RETURN(f.bits, required_bits(fields, kBits, {4, 8}));
  MOESAIC_ASSIGN_OR_RETURN(f.group_size, required_group(fields, kGroup));
  MOESAIC_ASSIGN_OR_RETURN(const auto desc_act, fields.boolean("desc_act"));
  f.act_order = desc_act.value_or(false) && f.group_size > 0;
  MOESAIC_ASSIGN_OR_RETURN(const auto symmetric, fields.boolean("sym"));
  f.zero_points = !symmetric.value_or(true);
  MOESAIC_RETURN_IF_ERROR(refuse_activation_steps(fields));
  MOESAIC_ASSIGN_OR_RETURN(const auto format, packing_of(fields, "checkpoint_format"));
  if (format && *format != "gptq" && *format != "gptq_v2") {
    return fields.unsupported(
        fmt::format("checkpoint_format: got {}, need gptq or gptq_v2", quote_name(*format)));
  }
  f.zeros_minus_one = !format || *format == "gptq";
  MOESAIC_RETURN_IF_ERROR(read_quantized_modules(fields, &quant));
  MOESAIC_RETURN_IF_ERROR(read_left_out(fields, &quant));
  return quant;
}

Result<QuantConfig> parse_awq(const ConfigFields& fields) {
  QuantConfig quant;
  LinearFormat& f = quant.linear;
  f.stored = StoredFormat::kAwq;
  constexpr std::array<std::string_view, 2> kBits = {"bits", "w_bit"};
  constexpr std::array<std::string_view, 2> kGroup = {"group_size", "q_group_size"};
  MOESAIC_ASSIGN_OR_RETURN(f.bits, required_bits(fields, kBits, {4}));
  MOESAIC_ASSIGN_OR_RETURN(f.group_size, required_group(fields, kGroup));
  // Zero points are stored either way; those of symmetric files (AutoRound, GPTQModel) are all 8.
  MOESAIC_ASSIGN_OR_RETURN(const auto zero_point, fields.boolean("zero_point"));
  f.zero_points = zero_point.value_or(true) || MOESAIC_FAULT(checkpoint_awq_always_has_zeros);
  // To read those of symmetric ones is right, to leave out others is not.
  MOESAIC_ASSIGN_OR_RETURN(const auto symmetric, fields.boolean("sym"));
  if (!f.zero_points && !symmetric.value_or(true) && !MOESAIC_FAULT(checkpoint_zero_point_wins)) {
    return Status(StatusCode::kAmbiguousFormat,
                  fields.where() + ": zero_point is false, and so is sym, need one of them true");
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto version, packing_of(fields, "version"));
  if (version && lower_case(*version) != "gemm") {
    return fields.unsupported(fmt::format("version: got {}, need gemm", quote_name(*version)));
  }
  // Its own packing, whatever the version says.
  MOESAIC_ASSIGN_OR_RETURN(const auto backend, fields.string("backend"));
  if (backend && lower_case(*backend) == "llm-awq") {
    return fields.unsupported("backend: got \"llm-awq\", need \"autoawq\" or no field");
  }
  MOESAIC_RETURN_IF_ERROR(refuse_activation_steps(fields));
  MOESAIC_RETURN_IF_ERROR(read_left_out(fields, &quant));
  return quant;
}

Result<QuantConfig> parse_bitsandbytes(const ConfigFields& fields) {
  QuantConfig quant;
  LinearFormat& f = quant.linear;
  MOESAIC_ASSIGN_OR_RETURN(const auto four, fields.boolean("load_in_4bit"));
  MOESAIC_ASSIGN_OR_RETURN(const auto eight, fields.boolean("load_in_8bit"));
  if (four.value_or(false) == eight.value_or(false)) {
    return Status(StatusCode::kAmbiguousFormat,
                  fmt::format("{}: load_in_4bit and load_in_8bit are both {}, need one of them",
                              fields.where(), four.value_or(false)));
  }
  MOESAIC_RETURN_IF_ERROR(append_skips(fields, "llm_int8_skip_modules", false, &quant));
  if (eight.value_or(false)) {
    f.stored = StoredFormat::kBnb8;
    return quant;
  }
  f.stored = StoredFormat::kBnb4;
  f.bits = 4;
  f.group_size = quant::kBnbBlockSize;  // replaced by what the files have: see choose_block_size
  MOESAIC_ASSIGN_OR_RETURN(const auto type, fields.string("bnb_4bit_quant_type"));
  if (!type || (*type != "nf4" && *type != "fp4")) {
    return fields.unsupported(fmt::format("bnb_4bit_quant_type: got {}, need nf4 or fp4",
                                          type ? quote_name(*type) : "none"));
  }
  f.table = *type == "nf4" ? CodeTable::kNf4 : CodeTable::kFp4;
  MOESAIC_ASSIGN_OR_RETURN(const auto nested, fields.boolean("bnb_4bit_use_double_quant"));
  f.nested = nested.value_or(false);
  MOESAIC_ASSIGN_OR_RETURN(const auto storage, fields.string("bnb_4bit_quant_storage"));
  if (storage && *storage != "uint8") {
    return fields.unsupported(
        fmt::format("bnb_4bit_quant_storage: got {}, need uint8", quote_name(*storage)));
  }
  return quant;
}

}  // namespace moesaic::checkpoint
