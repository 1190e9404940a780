// quantization_config of ModelOpt, and its hf_quant_config.json. Source: docs/spec/checkpoints.md
// section 4.2; for mixed precision, what ModelOpt writes.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "checkpoint/config/quant_methods.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::checkpoint {
namespace {

struct Algorithm {
  std::string_view name;
  StoredFormat stored;
  ActivationQuant activation;
  int bits = 0;  // see LinearFormat
};
constexpr auto kAlgorithms = std::to_array<Algorithm>({
    {"fp8", StoredFormat::kFp8Tensor, ActivationQuant::kStatic},
    {"fp8_per_channel_per_token", StoredFormat::kFp8Channel, ActivationQuant::kDynamic},
    {"fp8_pb_wo", StoredFormat::kFp8Block, ActivationQuant::kNone},
    {"nvfp4", StoredFormat::kNvfp4, ActivationQuant::kStatic},
    {"w4a16_nvfp4", StoredFormat::kNvfp4, ActivationQuant::kNone},
    {"mxfp8", StoredFormat::kMxfp8, ActivationQuant::kDynamic},
    {"w4a8_mxfp4_fp8", StoredFormat::kMxfp4Linear, ActivationQuant::kStatic, 8},
});

Result<std::string> algorithm_of(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(auto name, fields.string("quant_algo"));
  if (name) return std::move(*name);
  return Status(StatusCode::kCorruptFile,
                fields.where() + ": quant_algo: missing, need the name of an algorithm");
}

const Algorithm* find_algorithm(const std::string& name) {
  const auto* const found =
      std::find_if(kAlgorithms.begin(), kAlgorithms.end(),
                   [&](const Algorithm& a) { return a.name == lower_case(name); });
  return found == kAlgorithms.end() ? nullptr : found;
}

std::string unknown_algorithm(const std::string& name) {
  return fmt::format(
      "quant_algo: got {}, need FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, "
      "W4A16_NVFP4, MXFP8, W4A8_MXFP4_FP8, or for the whole model MIXED_PRECISION",
      quote_name(name));
}

// The format that the algorithm in `fields` means, with the group size beside it.
Result<LinearFormat> read_format(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const std::string name, algorithm_of(fields));
  const Algorithm* const found = find_algorithm(name);
  if (found == nullptr) return fields.unsupported(unknown_algorithm(name));
  LinearFormat format;
  format.names = NameStyle::kModelOpt;
  format.stored = found->stored;
  format.activation = found->activation;
  format.bits = found->bits;
  MOESAIC_ASSIGN_OR_RETURN(const auto group, fields.integer("group_size", {1, 1 << 20}));
  if (group && found->stored == StoredFormat::kNvfp4 && *group != quant::kNvfp4GroupSize) {
    return fields.bad_value("group_size", fmt::to_string(*group), "16 with NVFP4");
  }
  if (group && found->stored == StoredFormat::kMxfp4Linear && *group != quant::kMxGroupSize) {
    return fields.bad_value("group_size", fmt::to_string(*group), "32 with MXFP4");
  }
  if (group && found->stored == StoredFormat::kFp8Block) format.block = {*group, *group};
  return format;
}

// ModelOpt 0.47 renames modules with a mark behind their names, a NUL and a word, and leaves it
// there when the renaming took the dot before it. What counts is the name, with its wildcard.
void drop_name_mark(std::string* entry) {
  const std::size_t nul = entry->find('\0');
  if (nul == std::string::npos || MOESAIC_FAULT(checkpoint_keep_name_mark)) return;
  const std::string_view wildcard = entry->ends_with(".*")  ? ".*"
                                    : entry->ends_with("*") ? "*"
                                                            : "";
  std::string name = entry->substr(0, nul);
  if (name.ends_with(".")) name.pop_back();
  *entry = name + std::string(wildcard);
}

// Names of algorithms that nobody knows are kept apart, each compared with all before it.
constexpr std::size_t kMaxAlgorithms = 64;
Status too_many_algorithms(const ConfigFields& fields) {
  return {StatusCode::kLimitExceeded,
          fmt::format("{}: quantized_layers: got more than {} algorithms and group sizes, need at "
                      "most {}",
                      fields.where(), kMaxAlgorithms, kMaxAlgorithms)};
}

// MIXED_PRECISION: every module that is quantised with its algorithm, one linear each or all
// experts of a layer; a group for each format. Modules that are not listed are not quantised. One
// whose algorithm is not read may be a module that nobody reads (lm_head, a tower of images).
Status read_layers(const ConfigFields& fields, QuantConfig* quant) {
  constexpr std::string_view kField = "quantized_layers";
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* layers, fields.object(kField));
  if (layers == nullptr || layers->empty()) {
    return {StatusCode::kCorruptFile,
            fmt::format("{}: {}: missing, need the algorithms of modules with MIXED_PRECISION",
                        fields.where(), kField)};
  }
  MOESAIC_RETURN_IF_ERROR(check_entry_count(fields, kField, layers->size()));
  const ConfigFields entries(*layers, fmt::format("{}: {}", fields.where(), kField));
  for (const auto& [key, value] : layers->items()) {
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* entry, entries.object(key));
    if (entry == nullptr || key.empty()) {
      return entries.bad_value(quote_name(key), value.dump(), "a module's name and its algorithm");
    }
    const ConfigFields layer(*entry, fmt::format("{}: {}", entries.where(), quote_name(key)));
    QuantGroup made;
    MOESAIC_ASSIGN_OR_RETURN(made.name, algorithm_of(layer));
    if (find_algorithm(made.name) == nullptr) {
      made.unread = unknown_algorithm(made.name);
    } else {
      MOESAIC_ASSIGN_OR_RETURN(made.format, read_format(layer));
    }
    auto group = std::find_if(quant->groups.begin(), quant->groups.end(), [&](const QuantGroup& g) {
      return (g.format == made.format && g.unread == made.unread) ||
             MOESAIC_FAULT(checkpoint_mixed_is_one_format);
    });
    if (group == quant->groups.end()) {
      if (quant->groups.size() == kMaxAlgorithms) return too_many_algorithms(fields);
      quant->groups.push_back(std::move(made));
      group = quant->groups.end() - 1;
    }
    group->targets.push_back(key);
    drop_name_mark(&group->targets.back());
  }
  const auto read = std::find_if(quant->groups.begin(), quant->groups.end(),
                                 [](const QuantGroup& g) { return g.unread.empty(); });
  if (read != quant->groups.end()) quant->linear = read->format;
  return {};
}

}  // namespace

Result<QuantConfig> parse_modelopt(const ConfigFields& fields) {
  // Some configurations hold what hf_quant_config.json does, as it is there.
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* whole, fields.object("quantization"));
  if (whole != nullptr) {
    return parse_modelopt(ConfigFields(*whole, fields.where() + ": quantization"));
  }
  QuantConfig quant;
  quant.rule = NameRule::kGlob;
  MOESAIC_ASSIGN_OR_RETURN(const std::string name, algorithm_of(fields));
  if (lower_case(name) == "mixed_precision") {
    MOESAIC_RETURN_IF_ERROR(read_layers(fields, &quant));
  } else {
    MOESAIC_ASSIGN_OR_RETURN(quant.linear, read_format(fields));
  }
  for (const std::string_view list : {"ignore", "exclude_modules"}) {
    MOESAIC_RETURN_IF_ERROR(append_skips(fields, list, false, &quant));
  }
  for (std::string& entry : quant.skips) drop_name_mark(&entry);
  return quant;
}

}  // namespace moesaic::checkpoint
