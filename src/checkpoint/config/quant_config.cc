#include "checkpoint/config/quant_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/config/config.h"
#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/module_patterns.h"
#include "checkpoint/config/quant_methods.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "quant/block_scales.h"
#include "quant/mx.h"

namespace moesaic::checkpoint {
namespace {

// [rows, columns], or none (one scale per tensor).
Result<std::optional<quant::BlockShape>> read_block_size(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const auto block, fields.integers("weight_block_size", {1, 1 << 20}, 2));
  if (!block) return std::optional<quant::BlockShape>();
  if (block->size() != 2) {
    return Status(StatusCode::kCorruptFile,
                  fmt::format("{}: weight_block_size: got {} entries, need 2", fields.where(),
                              block->size()));
  }
  return std::optional(quant::BlockShape{(*block)[0], (*block)[1]});
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

// The codes' type, where it is stated.
Status check_element(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const auto element, fields.string("fmt"));
  // Spellings of one type in published files: MiniMax-M2 writes torch's name of it.
  constexpr auto kE4m3Names =
      std::to_array<std::string_view>({"e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"});
  if (element && std::find(kE4m3Names.begin(), kE4m3Names.end(), *element) == kE4m3Names.end()) {
    return unsupported(fmt::format("{}: fmt: got {}, need \"e4m3\" or \"float8_e4m3fn\"",
                                   fields.where(), quote_name(*element)));
  }
  return {};
}

// Experts in a format of their own beside linears of this one: NVFP4 of DeepSeek-V4 and MiniMax-M3.1.
Status refuse_other_experts(const ConfigFields& fields) {
  MOESAIC_ASSIGN_OR_RETURN(const auto algorithm, fields.string("moe_quant_algo"));
  if (!algorithm || MOESAIC_FAULT(checkpoint_moe_quant_algo_is_ignored)) return {};
  return fields.unsupported(
      fmt::format("moe_quant_algo {} is not supported, need no field", quote_name(*algorithm)));
}

// MXFP8 under the names of FP8 blocks, as MiniMax-M3 is published: a block is a scale's group.
Result<QuantConfig> parse_mxfp8(const ConfigFields& fields) {
  QuantConfig quant;
  quant.linear.stored = StoredFormat::kMxfp8;
  quant.linear.names = NameStyle::kFp8Inverse;
  quant.linear.activation = ActivationQuant::kDynamic;
  MOESAIC_RETURN_IF_ERROR(check_element(fields));
  MOESAIC_RETURN_IF_ERROR(refuse_other_experts(fields));
  MOESAIC_ASSIGN_OR_RETURN(const auto block, read_block_size(fields));
  if (block && !(block->n == 1 && block->k == quant::kMxGroupSize)) {
    return fields.bad_value("weight_block_size", fmt::format("[{}, {}]", block->n, block->k),
                            fmt::format("[1, {}] with mxfp8", quant::kMxGroupSize));
  }
  for (const auto& [field, need] :
       {std::pair{"activation_scheme", "dynamic"}, std::pair{"scale_fmt", "ue8m0"}}) {
    MOESAIC_ASSIGN_OR_RETURN(const auto word, fields.string(field));
    if (!word || *word == need) continue;
    return fields.unsupported(
        fmt::format("{}: got {}, need \"{}\" with mxfp8", field, quote_name(*word), need));
  }
  MOESAIC_RETURN_IF_ERROR(read_skips(fields, &quant));
  return quant;
}

Result<QuantConfig> parse_fp8(const ConfigFields& fields) {
  QuantConfig quant;
  MOESAIC_RETURN_IF_ERROR(check_element(fields));
  MOESAIC_RETURN_IF_ERROR(refuse_other_experts(fields));
  // Transformers' word for experts in MXFP4 under the names of FP8.
  MOESAIC_ASSIGN_OR_RETURN(const auto expert_dtype, fields.string("expert_dtype"));
  if (expert_dtype && *expert_dtype != "fp8") {
    return unsupported(fmt::format("{}: expert_dtype {} is not supported, need \"fp8\"",
                                   fields.where(), quote_name(*expert_dtype)));
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto block, read_block_size(fields));
  const bool blocks = block.has_value();
  quant.linear.stored = blocks ? StoredFormat::kFp8Block : StoredFormat::kFp8Tensor;
  if (blocks) quant.linear.block = *block;
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

// GPTQ and AWQ, which AutoRound writes as well.
Result<QuantConfig> parse_integers(const ConfigFields& fields, const std::string& method) {
  MOESAIC_ASSIGN_OR_RETURN(QuantConfig quant,
                           method == "gptq" ? parse_gptq(fields) : parse_awq(fields));
  MOESAIC_RETURN_IF_ERROR(check_extra_config(fields, &quant));
  return quant;
}

Result<QuantConfig> parse_method(const ConfigFields& fields, const std::string& method) {
  if (method == "fp8") return parse_fp8(fields);
  if (method == "mxfp4") return parse_mxfp4(fields);
  if (method == "mxfp8") return parse_mxfp8(fields);
  if (method == "compressed-tensors") return parse_compressed_tensors(fields);
  if (method == "gptq" || method == "awq") return parse_integers(fields, method);
  if (method == "auto-round" || method == "intel/auto-round") return parse_auto_round(fields);
  if (method == "bitsandbytes") return parse_bitsandbytes(fields);
  if (method == "modelopt" || method == "modelopt_fp4") return parse_modelopt(fields);
  return unsupported(fmt::format(
      "{}: quant_method {} is not supported, need fp8, mxfp8, mxfp4, compressed-tensors, gptq, "
      "awq, auto-round, modelopt, bitsandbytes, or no quantization_config",
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
      const bool regexes =
          quant.rule == NameRule::kExactOrRegex || quant.rule == NameRule::kTextOrRegex;
      if (regexes && entry.starts_with("re:")) {
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
  for (const QuantOverride& entry : quant.overrides) {
    if (entry.pattern.empty()) continue;  // a text
    MOESAIC_RETURN_IF_ERROR(
        regex_matches(fmt::format("{}: {}", where, entry.list), entry.pattern, "x").status());
  }
  for (const QuantPart& part : quant.parts) {
    MOESAIC_RETURN_IF_ERROR(check_patterns(where, part.quant));
  }
  return {};
}

}  // namespace

Result<QuantConfig> parse_quant_config(const nlohmann::json& top) {
  const std::array<ConfigHolder, 1> holders = {{{&top, "config.json"}}};
  return parse_quant_config(holders);
}

Result<QuantConfig> parse_quant_config(std::span<const ConfigHolder> holders) {
  const nlohmann::json* found = nullptr;
  std::string found_where;
  for (const std::string_view key : {"quantization_config", "compression_config"}) {
    for (const auto& [holder, where] : holders) {
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
  return guard_allocation(name, [&]() -> Result<QuantConfig> {
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json top,
                             parse_json_document(name, json, {kMaxConfigBytes, kMaxConfigDepth}));
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
  for (QuantConfig* quant : {&a, &b}) {
    std::sort(quant->skips.begin(), quant->skips.end());
    std::sort(quant->only.begin(), quant->only.end());
    std::sort(quant->blocks.begin(), quant->blocks.end());
  }
  return a == b;
}

}  // namespace moesaic::checkpoint
