#include "checkpoint/config/quant_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/module_patterns.h"
#include "checkpoint/config/quant_methods.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "quant/block_scales.h"

namespace moesaic::checkpoint {
namespace {

using Parts = std::vector<std::string_view>;

Parts split(std::string_view name) {
  Parts parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = name.find('.', begin);
    parts.push_back(name.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

bool part_matches(std::string_view pattern, std::string_view part) {
  return pattern == "*" || pattern == part;
}

// Whether the pattern's parts appear side by side in the name; `at_end`: as its last parts.
bool contains(const Parts& name, const Parts& pattern, bool at_end = false) {
  if (pattern.size() > name.size()) return false;
  const std::size_t last = name.size() - pattern.size();
  for (std::size_t start = at_end ? last : 0; start <= last; ++start) {
    if (std::equal(pattern.begin(), pattern.end(),
                   name.begin() + static_cast<std::ptrdiff_t>(start), part_matches)) {
      return true;
    }
  }
  return false;
}

bool is_number(std::string_view part) {
  return !part.empty() && std::all_of(part.begin(), part.end(),
                                      [](unsigned char c) { return std::isdigit(c) != 0; });
}

// [128, 128], or none (one scale per tensor).
Result<bool> read_block_size(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const auto block, fields.integers("weight_block_size", {1, 1 << 20}, 2));
  if (!block) return false;
  if (block->size() != 2) {
    return Status(StatusCode::kCorruptFile,
                  fmt::format("{}: weight_block_size: got {} entries, need 2", fields.where(),
                              block->size()));
  }
  if ((*block)[0] == quant::kFp8BlockSize && (*block)[1] == quant::kFp8BlockSize) return true;
  return unsupported(fmt::format(
      "{}: quant_method \"fp8\" with weight_block_size [{}, {}] is not supported, need [128, 128]",
      fields.where(), (*block)[0], (*block)[1]));
}

Status read_skips(const ConfigFields& fields, QuantConfig* quant) {
  for (const std::string_view list : {"modules_to_not_convert", "ignored_layers"}) {
    MOESAIC_RETURN_IF_ERROR(append_skips(fields, list, false, quant));
  }
  return {};
}

Result<QuantConfig> parse_mxfp4(const ConfigFields& fields) {
  QuantConfig quant;
  quant.linear.stored = StoredFormat::kMxfp4;
  MOESAIC_RETURN_IF_ERROR(read_skips(fields, &quant));
  return quant;
}

Result<QuantConfig> parse_fp8(const ConfigFields& fields) {
  QuantConfig quant;
  MOESAIC_ASSIGN_OR_RETURN(const auto element, fields.string("fmt"));
  if (element && *element != "e4m3") {
    return unsupported(
        fmt::format("{}: quant_method \"fp8\" with fmt {} is not supported, need "
                    "\"e4m3\"",
                    fields.where(), quote_name(*element)));
  }
  // Transformers' word for experts in MXFP4 under the names of FP8.
  MOESAIC_ASSIGN_OR_RETURN(const auto expert_dtype, fields.string("expert_dtype"));
  if (expert_dtype && *expert_dtype != "fp8") {
    return unsupported(fmt::format("{}: expert_dtype {} is not supported, need \"fp8\"",
                                   fields.where(), quote_name(*expert_dtype)));
  }
  MOESAIC_ASSIGN_OR_RETURN(const bool blocks, read_block_size(fields));
  quant.linear.stored = blocks ? StoredFormat::kFp8Block : StoredFormat::kFp8Tensor;
  MOESAIC_ASSIGN_OR_RETURN(const auto scheme, fields.string("activation_scheme"));
  const bool fixed = scheme && *scheme == "static";
  if (scheme && *scheme != "dynamic" && !fixed) {
    return fields.bad_value("activation_scheme", quote_name(*scheme), "\"dynamic\" or \"static\"");
  }
  if (fixed && blocks) {
    return fields.unsupported(
        "activation_scheme: got \"static\" with weight_block_size, need \"dynamic\"");
  }
  quant.linear.activation = fixed ? ActivationQuant::kStatic : ActivationQuant::kDynamic;
  MOESAIC_ASSIGN_OR_RETURN(const auto scale_fmt, fields.string("scale_fmt"));
  if (scale_fmt && *scale_fmt != "ue8m0" && *scale_fmt != "float") {
    return unsupported(fmt::format("{}: scale_fmt {} is not supported, need \"ue8m0\" or no field",
                                   fields.where(), quote_name(*scale_fmt)));
  }
  quant.linear.ue8m0 = scale_fmt && *scale_fmt == "ue8m0" && blocks;
  MOESAIC_RETURN_IF_ERROR(read_skips(fields, &quant));
  return quant;
}

Result<QuantConfig> parse_method(const ConfigFields& fields, const std::string& method) {
  if (method == "fp8") return parse_fp8(fields);
  if (method == "mxfp4") return parse_mxfp4(fields);
  if (method == "compressed-tensors") return parse_compressed_tensors(fields);
  if (method == "gptq") return parse_gptq(fields);
  if (method == "awq") return parse_awq(fields);
  if (method == "bitsandbytes") return parse_bitsandbytes(fields);
  if (method == "modelopt" || method == "modelopt_fp4") return parse_modelopt(fields);
  return unsupported(fmt::format(
      "{}: quant_method {} is not supported, need fp8, mxfp4, compressed-tensors, gptq, awq, "
      "modelopt, bitsandbytes, or no quantization_config",
      fields.where(), quote_name(method)));
}

// The description in one of two parts; its fields are those of a whole model's.
Result<QuantConfig> parse_half(const ConfigFields& fields, std::string_view half,
                               std::vector<std::string>* modules) {
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* object, fields.object(half));
  const auto missing = [&](std::string_view field, std::string_view need) {
    return Status(StatusCode::kCorruptFile,
                  fmt::format("{}: {}: missing, need {}", fields.where(), field, need));
  };
  if (object == nullptr) return missing(half, "an object");
  const ConfigFields inside(*object, fmt::format("{}: {}", fields.where(), half));
  if (modules != nullptr) {
    MOESAIC_ASSIGN_OR_RETURN(auto list, inside.strings("modules", kMaxSkipEntries));
    if (!list || list->empty()) {
      return missing(fmt::format("{}: modules", half), "a list of module names");
    }
    *modules = std::move(*list);
  }
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* quant, inside.object("quantization_config"));
  if (quant == nullptr) return missing(fmt::format("{}: quantization_config", half), "an object");
  const ConfigFields description(*quant, inside.where() + ": quantization_config");
  MOESAIC_ASSIGN_OR_RETURN(const auto method, description.string("quant_method"));
  if (!method) {
    return missing(fmt::format("{}: quantization_config: quant_method", half), "a name");
  }
  return parse_method(description, *method);
}

Result<QuantConfig> parse_parts(const ConfigFields& fields) {
  QuantPart experts;
  MOESAIC_ASSIGN_OR_RETURN(experts.quant, parse_half(fields, kExpertsPart, &experts.modules));
  MOESAIC_ASSIGN_OR_RETURN(QuantConfig quant, parse_half(fields, kOthersPart, nullptr));
  quant.parts.push_back(std::move(experts));
  return quant;
}

// Every regular expression is compiled once here, so that matching cannot fail later.
Status check_patterns(const std::string& where, const QuantConfig& quant) {
  const auto check = [&](const std::vector<std::string>& entries, std::string_view list) -> Status {
    for (const std::string& entry : entries) {
      if (quant.rule == NameRule::kExactOrRegex && entry.starts_with("re:")) {
        MOESAIC_RETURN_IF_ERROR(
            regex_matches(fmt::format("{}: {}", where, list), entry.substr(3), "x").status());
      }
      if (quant.rule == NameRule::kGlob && entry.size() > kMaxPatternBytes) {
        return unsupported(fmt::format("{}: {}: got a pattern of {} bytes, need at most {}", where,
                                       list, entry.size(), kMaxPatternBytes));
      }
    }
    return {};
  };
  MOESAIC_RETURN_IF_ERROR(check(quant.skips, "ignore"));
  for (const QuantGroup& group : quant.groups) {
    MOESAIC_RETURN_IF_ERROR(check(group.targets, "targets"));
  }
  for (const QuantPart& part : quant.parts) {
    MOESAIC_RETURN_IF_ERROR(check_patterns(where, part.quant));
  }
  return {};
}

bool entry_matches(NameRule rule, const std::string& entry, std::string_view module) {
  switch (rule) {
    case NameRule::kParts:
      // A bare number would match any layer or expert that happens to have it.
      return !is_number(entry) && contains(split(module), split(entry));
    case NameRule::kExactOrRegex:
      if (!entry.starts_with("re:")) return entry == module || entry == "Linear";
      return regex_matches("", entry.substr(3), module).ok() &&
             *regex_matches("", entry.substr(3), module);
    case NameRule::kGlob:
      return glob_matches(entry, std::string(module)) ||
             (module.starts_with(entry) &&
              (module.size() == entry.size() || module[entry.size()] == '.'));
  }
  return false;
}

bool any_matches(NameRule rule, const std::vector<std::string>& entries, std::string_view module) {
  return std::any_of(entries.begin(), entries.end(),
                     [&](const std::string& entry) { return entry_matches(rule, entry, module); });
}

// Whether an entry may match some experts and not others. A name must be one of theirs; a pattern
// without digits can distinguish only the number of digits.
bool tells_experts(NameRule rule, const std::string& entry, std::string_view experts) {
  const bool pattern = rule == NameRule::kGlob || entry.starts_with("re:");
  if (!pattern) return entry.starts_with(experts);
  return std::any_of(entry.begin(), entry.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; }) ||
         entry.find("\\d") != std::string::npos;
}

// The experts whose names are checked one by one: all, or one per number of digits and the last.
std::vector<std::int64_t> telling_experts(const QuantConfig& quant, std::string_view experts,
                                          std::int64_t num_experts) {
  const auto tells = [&](const std::string& entry) {
    return tells_experts(quant.rule, entry, experts);
  };
  bool all = std::any_of(quant.skips.begin(), quant.skips.end(), tells);
  for (const QuantGroup& group : quant.groups) {
    all = all || std::any_of(group.targets.begin(), group.targets.end(), tells);
  }
  std::vector<std::int64_t> asked;
  std::int64_t power = 10;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const bool first_of_its_length = e == 0 || e == power;
    if (e == power) power *= 10;
    if (all || first_of_its_length || e == num_experts - 1) asked.push_back(e);
  }
  return asked;
}

Status partly(std::string_view what, std::string_view experts, std::string_view one,
              std::string_view other) {
  return unsupported(
      fmt::format("quantization_config: of the expert projections of {} some are {} "
                  "({}), others are not ({}); need all or none",
                  experts, what, one, other));
}

// skips_experts by checking each member.
Result<bool> skips_each(const QuantConfig& quant, std::string_view experts,
                        std::int64_t num_experts, std::span<const std::string_view> projections) {
  std::string skipped, kept;
  for (const std::int64_t e : telling_experts(quant, experts, num_experts)) {
    for (const std::string_view projection : projections) {
      std::string name = fmt::format("{}.{}.{}", experts, e, projection);
      (skips_module(quant, name) ? skipped : kept) = std::move(name);
    }
  }
  if (!skipped.empty() && !kept.empty()) return partly("left out", experts, skipped, kept);
  return kept.empty();
}

}  // namespace

Result<QuantConfig> parse_quant_config(const nlohmann::json& top, const nlohmann::json* nested) {
  const nlohmann::json* found = nullptr;
  std::string found_where;
  for (const std::string_view key : {"quantization_config", "compression_config"}) {
    for (const nlohmann::json* holder : {&top, nested}) {
      if (holder == nullptr) continue;
      const std::string where = holder == &top ? "config.json" : "config.json: text_config";
      MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* object,
                               ConfigFields(*holder, where).object(key));
      if (object == nullptr) continue;
      if (found != nullptr && *found != *object) {
        return Status(StatusCode::kAmbiguousFormat,
                      fmt::format("{} and {}: {} differ, need one description of the quantisation",
                                  found_where, where, key));
      }
      found = object;
      found_where = fmt::format("{}: {}", where, key);
    }
  }
  if (found == nullptr) return QuantConfig{};
  const ConfigFields fields(*found, found_where);
  MOESAIC_ASSIGN_OR_RETURN(const auto method, fields.string("quant_method"));
  const bool parts = found->contains(kExpertsPart) || found->contains(kOthersPart);
  if (method && parts) {
    return Status(StatusCode::kAmbiguousFormat,
                  fmt::format("{}: has quant_method beside {} and {}, need one description",
                              found_where, kExpertsPart, kOthersPart));
  }
  if (!method && !parts) {
    return Status(StatusCode::kCorruptFile,
                  found_where + ": quant_method: missing, need the name of a method");
  }
  MOESAIC_ASSIGN_OR_RETURN(QuantConfig quant,
                           parts ? parse_parts(fields) : parse_method(fields, *method));
  MOESAIC_RETURN_IF_ERROR(check_patterns(found_where, quant));
  return quant;
}

Result<QuantConfig> parse_quant_side_file(std::string_view name, std::string_view json) {
  constexpr std::size_t kMaxBytes = 8'000'000;
  constexpr int kMaxDepth = 32;
  return guard_allocation(name, [&]() -> Result<QuantConfig> {
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json top,
                             parse_json_document(name, json, {kMaxBytes, kMaxDepth}));
    if (!top.is_object()) {
      return Status(StatusCode::kCorruptFile, fmt::format("{}: need an object at the top", name));
    }
    const ConfigFields fields(top, std::string(name));
    Result<QuantConfig> quant = QuantConfig{};
    if (name == "hf_quant_config.json") {
      MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* object, fields.object("quantization"));
      if (object == nullptr) {
        return Status(StatusCode::kCorruptFile,
                      fmt::format("{}: quantization: missing, need an object", name));
      }
      quant = parse_modelopt(ConfigFields(*object, fmt::format("{}: quantization", name)));
    } else {
      MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.string("quant_method"));
      quant = parse_method(fields, stated.value_or(name == "quant_config.json" ? "awq" : "gptq"));
    }
    if (quant.ok()) MOESAIC_RETURN_IF_ERROR(check_patterns(std::string(name), *quant));
    return quant;
  });
}

bool same_quantisation(QuantConfig a, QuantConfig b) {
  std::sort(a.skips.begin(), a.skips.end());
  std::sort(b.skips.begin(), b.skips.end());
  return a == b;
}

const QuantConfig& description_of(const QuantConfig& quant, std::string_view module) {
  if (MOESAIC_FAULT(checkpoint_quant_parts_ignored)) return quant;
  for (const QuantPart& part : quant.parts) {
    for (const std::string& name : part.modules) {
      if (module.starts_with(name) &&
          (module.size() == name.size() || module[name.size()] == '.')) {
        return part.quant;
      }
    }
  }
  return quant;
}

bool skips_module(const QuantConfig& quant, std::string_view module) {
  return any_matches(quant.rule, quant.skips, module);
}

const QuantGroup* group_of(const QuantConfig& quant, std::string_view module) {
  for (const int round : {0, 1, 2}) {
    for (const QuantGroup& group : quant.groups) {
      for (const std::string& target : group.targets) {
        const int kind = target == "Linear" ? 2 : target.starts_with("re:") ? 1 : 0;
        if (kind == round && entry_matches(quant.rule, target, module)) return &group;
      }
    }
  }
  return nullptr;
}

LinearFormat module_format(const QuantConfig& whole, std::string_view module) {
  const QuantConfig& quant = description_of(whole, module);
  if (!quant.quantized() || skips_module(quant, module)) return {};
  if (quant.groups.empty()) return quant.linear;
  const QuantGroup* group = group_of(quant, module);
  return group != nullptr ? group->format : LinearFormat{};
}

Result<LinearFormat> experts_format(const QuantConfig& whole, std::string_view experts,
                                    std::int64_t num_experts,
                                    std::span<const std::string_view> projections) {
  const QuantConfig& quant = description_of(whole, experts);
  if (!quant.quantized()) return LinearFormat{};
  MOESAIC_ASSIGN_OR_RETURN(const bool skipped,
                           skips_experts(quant, experts, num_experts, projections));
  if (skipped) return LinearFormat{};
  if (quant.groups.empty()) return quant.linear;
  std::string first_name;
  LinearFormat first;
  for (const std::int64_t e : telling_experts(quant, experts, num_experts)) {
    for (const std::string_view projection : projections) {
      const std::string name = fmt::format("{}.{}.{}", experts, e, projection);
      const LinearFormat format = module_format(quant, name);
      if (first_name.empty()) {
        first_name = name;
        first = format;
      } else if (!(format == first)) {
        return partly(fmt::format("of the format {}", stored_format_name(first.stored)), experts,
                      first_name, name);
      }
    }
  }
  return first;
}

Result<bool> skips_experts(const QuantConfig& quant, std::string_view experts,
                           std::int64_t num_experts,
                           std::span<const std::string_view> projections) {
  if (quant.skips.empty() || MOESAIC_FAULT(checkpoint_skip_list_ignored)) return false;
  if (skips_module(quant, experts)) return true;
  if (quant.rule != NameRule::kParts) return skips_each(quant, experts, num_experts, projections);

  // Entries that reach below the experts module: "<experts>.<e>", "<experts>.<e>.<projection>",
  // "<experts>.<projection>", or the ends of these names.
  const Parts prefix = split(experts);
  std::set<std::pair<std::int64_t, std::size_t>> listed;
  const auto list = [&](std::string_view expert, std::size_t projection) {
    if (expert == "*") {
      for (std::int64_t e = 0; e < num_experts; ++e) listed.emplace(e, projection);
    } else if (expert.size() <= 9) {  // longer numbers are no expert of ours
      const std::int64_t e = std::stoll(std::string(expert));
      if (e < num_experts) listed.emplace(e, projection);
    }
  };
  for (const std::string& entry : quant.skips) {
    Parts parts = split(entry);
    const auto named = std::find(projections.begin(), projections.end(), parts.back());
    const bool has_projection = named != projections.end();
    if (has_projection) parts.pop_back();
    const bool has_expert = !parts.empty() && (is_number(parts.back()) || parts.back() == "*");
    const std::string_view expert = has_expert ? parts.back() : "*";
    if (has_expert) parts.pop_back();
    if (!has_projection && !has_expert) continue;
    // A bare number says nothing about experts; a bare projection names it in every expert.
    if (parts.empty() ? !has_projection : !contains(prefix, parts, /*at_end=*/true)) continue;
    const auto first = static_cast<std::size_t>(named - projections.begin());
    for (std::size_t p = has_projection ? first : 0;
         p < (has_projection ? first + 1 : projections.size()); ++p) {
      list(expert, p);
    }
  }
  const std::size_t all = static_cast<std::size_t>(num_experts) * projections.size();
  if (listed.empty()) return false;
  if (listed.size() == all) return true;
  // Name one of each group, so that the reader finds the odd one.
  std::pair<std::int64_t, std::size_t> missing{0, 0};
  for (std::size_t i = 0; i < all; ++i) {
    missing = {static_cast<std::int64_t>(i / projections.size()), i % projections.size()};
    if (listed.count(missing) == 0) break;
  }
  const auto name = [&](const auto& member) {
    return fmt::format("{}.{}.{}", experts, member.first, projections[member.second]);
  };
  return unsupported(
      fmt::format("quantization_config: {} of {} expert projections of {} are left out ({}), the "
                  "others are not "
                  "({}); need all or none",
                  listed.size(), all, experts, name(*listed.begin()), name(missing)));
}

}  // namespace moesaic::checkpoint
