#include "checkpoint/quant_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/config_fields.h"
#include "checkpoint/names.h"
#include "core/fault.h"

namespace moesaic {
namespace {

// One entry per expert and projection of every layer is what careless exporters write.
constexpr std::size_t kMaxSkipEntries = 1 << 18;

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

// Do the pattern's parts appear side by side in the name? `at_end`: only as its last parts.
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

Status unsupported(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }

Status check_block_size(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const auto block, fields.integers("weight_block_size", {1, 1 << 20}, 2));
  if (!block) {
    return unsupported(fields.where() +
                       ": quant_method \"fp8\" without weight_block_size (one scale per tensor) is "
                       "not supported, need weight_block_size [128, 128]");
  }
  if (block->size() != 2) {
    return {StatusCode::kCorruptFile, fmt::format("{}: weight_block_size: got {} entries, need 2",
                                                  fields.where(), block->size())};
  }
  if ((*block)[0] == kFp8BlockSize && (*block)[1] == kFp8BlockSize) return {};
  return unsupported(fmt::format(
      "{}: quant_method \"fp8\" with weight_block_size [{}, {}] is not supported, need [128, 128]",
      fields.where(), (*block)[0], (*block)[1]));
}

Status read_skips(const ConfigFields& fields, std::string_view method, QuantConfig* quant) {
  for (const std::string_view list : {"modules_to_not_convert", "ignored_layers"}) {
    MOESAIC_ASSIGN_OR_RETURN(auto entries, fields.strings(list, kMaxSkipEntries));
    if (!entries) continue;
    for (std::string& entry : *entries) {
      if (entry.starts_with("re:")) {
        return unsupported(
            fmt::format("{}: {}: regular expression {} is not supported with "
                        "quant_method \"{}\", need module names",
                        fields.where(), list, quote_name(entry), method));
      }
      if (entry.empty()) return fields.bad_value(list, "an empty name", "module names");
      quant->skips.push_back(std::move(entry));
    }
  }
  return {};
}

Result<QuantConfig> parse_mxfp4(const ConfigFields& fields) {
  QuantConfig quant;
  quant.format = StoredFormat::kMxfp4;
  MOESAIC_RETURN_IF_ERROR(read_skips(fields, "mxfp4", &quant));
  return quant;
}

Result<QuantConfig> parse_fp8(const ConfigFields& fields) {
  QuantConfig quant;
  quant.format = StoredFormat::kFp8Block;
  MOESAIC_ASSIGN_OR_RETURN(const auto element, fields.string("fmt"));
  if (element && *element != "e4m3") {
    return unsupported(
        fmt::format("{}: quant_method \"fp8\" with fmt {} is not supported, need "
                    "\"e4m3\"",
                    fields.where(), quote_name(*element)));
  }
  MOESAIC_RETURN_IF_ERROR(check_block_size(fields));
  MOESAIC_ASSIGN_OR_RETURN(const auto scheme, fields.string("activation_scheme"));
  if (scheme && *scheme != "dynamic") {
    return fields.bad_value("activation_scheme", quote_name(*scheme),
                            "\"dynamic\" with weight_block_size");
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto scale_fmt, fields.string("scale_fmt"));
  if (scale_fmt && *scale_fmt != "ue8m0" && *scale_fmt != "float") {
    return unsupported(fmt::format("{}: scale_fmt {} is not supported, need \"ue8m0\" or no field",
                                   fields.where(), quote_name(*scale_fmt)));
  }
  quant.ue8m0 = scale_fmt && *scale_fmt == "ue8m0";
  MOESAIC_RETURN_IF_ERROR(read_skips(fields, "fp8", &quant));
  return quant;
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
  if (!method) {
    return Status(StatusCode::kCorruptFile,
                  found_where + ": quant_method: missing, need the name of a method");
  }
  if (*method == "fp8") return parse_fp8(fields);
  if (*method == "mxfp4") return parse_mxfp4(fields);
  return unsupported(
      fmt::format("{}: quant_method {} is not supported, need \"fp8\" with weight_block_size, "
                  "\"mxfp4\", or no quantization_config",
                  found_where, quote_name(*method)));
}

bool skips_module(const QuantConfig& quant, std::string_view module) {
  const Parts name = split(module);
  return std::any_of(quant.skips.begin(), quant.skips.end(), [&](const std::string& entry) {
    // A bare number would match any layer or expert that happens to have it.
    return !is_number(entry) && contains(name, split(entry));
  });
}

Result<bool> skips_experts(const QuantConfig& quant, std::string_view experts,
                           std::int64_t num_experts,
                           std::span<const std::string_view> projections) {
  if (quant.skips.empty() || MOESAIC_FAULT(checkpoint_skip_list_ignored)) return false;
  if (skips_module(quant, experts)) return true;

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

}  // namespace moesaic
