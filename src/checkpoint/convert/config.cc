#include "checkpoint/convert/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "checkpoint/config/config.h"
#include "checkpoint/config/language_model.h"
#include "checkpoint/config/module_patterns.h"
#include "checkpoint/config/python_constants.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/mapped_file.h"
#include "checkpoint/container/names.h"
#include "checkpoint/convert/other_entries.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kModelOpt = "modelopt";
constexpr std::array<const char*, 2> kDescriptions = {"quantization_config", "compression_config"};

Result<Json> parse_object(std::string_view label, std::string_view text) {
  MOESAIC_ASSIGN_OR_RETURN(
      Json json, parse_ordered_json_document(label, text, {kMaxConfigBytes, kMaxConfigDepth}));
  if (json.is_object()) return json;
  return Status(StatusCode::kCorruptFile, fmt::format("{}: not a JSON object", label));
}

Result<Json> parse_config(std::string_view text) {
  return parse_object("config.json", quote_python_constants(text));
}

std::string method_of(const Json& description) {
  const auto method = description.find("quant_method");
  return method != description.end() && method->is_string() ? method->get<std::string>() : "";
}

// The top of config.json and every object in it that the language model lies in or is.
std::vector<Json*> holders(Json* config) {
  std::vector<Json*> found = {config};
  const auto unordered = nlohmann::json::parse(config->dump(), nullptr, false);
  const Result<LanguageModel> model = find_language_model(unordered);
  if (!model.ok() || MOESAIC_FAULT(convert_looks_for_quantization_at_the_top)) return found;
  for (const std::string_view name : model->path) {
    found.push_back(&(*found.back())[std::string(name)]);
  }
  return found;
}

// ModelOpt's fields, which may lie in "quantization" as in its own file, beside the method's name.
Json flattened(Json description) {
  const auto inner = description.find("quantization");
  if (method_of(description) != kModelOpt || inner == description.end() || !inner->is_object()) {
    return description;
  }
  Json whole = {{"quant_method", kModelOpt}};
  whole.update(*inner);
  return whole;
}

// The description in config.json; null: none. Where several holders have it they are equal: else the
// checkpoint would not have opened.
Json stated_in_config(Json config) {
  const std::vector<Json*> all = holders(&config);
  for (const char* key : kDescriptions) {
    for (const Json* holder : all) {
      if (holder->contains(key) && (*holder)[key].is_object()) {
        return flattened((*holder)[key]);
      }
    }
  }
  return nullptr;
}

// The same from the files that ModelOpt, GPTQ and AWQ write beside it.
Result<Json> stated_in_side_file(const std::string& directory) {
  constexpr std::array<std::pair<const char*, const char*>, 3> kSideFiles = {
      {{"hf_quant_config.json", kModelOpt},
       {"quantize_config.json", "gptq"},
       {"quant_config.json", "awq"}}};
  for (const auto& [name, method] : kSideFiles) {
    const std::string path = fmt::format("{}/{}", directory, name);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) continue;
    MOESAIC_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxConfigBytes));
    MOESAIC_ASSIGN_OR_RETURN(Json json, parse_object(path, text));
    if (method == kModelOpt) json = Json(json["quantization"]);
    if (!json.is_object()) {
      return Status(StatusCode::kCorruptFile, fmt::format("{}: need an object", path));
    }
    Json whole = {{"quant_method", method}};
    whole.update(json);  // a quant_method of its own takes precedence
    return whole;
  }
  return Json(nullptr);
}

// "re:model\.layers\.[^.]+\.mlp\.experts\.": patterns for the converted experts of all layers.
// Where a linear that is copied would match (experts of a layer that is not converted), the layers
// are listed.
std::vector<std::string> expert_targets(const ConvertedModules& modules) {
  const auto escaped = [](std::string_view text) {
    std::string out;
    for (const char c : text) {
      if (c == '.') out += '\\';
      out += c;
    }
    return out;
  };
  std::map<std::string, std::vector<int>> layers;  // by the name with "#" for the layer's number
  for (const ConvertedModules::Experts& experts : modules.experts) {
    const std::string part = fmt::format(".{}.", experts.layer);
    std::string name = experts.module + ".";
    const std::size_t at = name.find(part);
    if (at != std::string::npos) name.replace(at + 1, part.size() - 2, "#");
    layers[name].push_back(experts.layer);
  }
  std::vector<std::string> targets;
  for (const auto& [name, numbers] : layers) {
    const std::size_t at = name.find('#');
    if (at == std::string::npos) {
      targets.push_back("re:" + escaped(name));
      continue;
    }
    const std::string before = escaped(name.substr(0, at)), after = escaped(name.substr(at + 1));
    const std::string any = fmt::format("{}[^.]+{}", before, after);
    const auto hits = [&](const std::string& module) {
      const Result<bool> hit = regex_matches("", any, module);
      return !hit.ok() || *hit;
    };
    if (std::none_of(modules.quantized.begin(), modules.quantized.end(), hits) &&
        std::none_of(modules.plain.begin(), modules.plain.end(), hits)) {
      targets.push_back("re:" + any);
      continue;
    }
    constexpr std::size_t kLayersPerPattern = 64;  // far from the longest pattern that is read
    for (std::size_t first = 0; first < numbers.size(); first += kLayersPerPattern) {
      const auto begin = numbers.begin() + static_cast<std::ptrdiff_t>(first);
      const auto end = numbers.begin() + static_cast<std::ptrdiff_t>(
                                             std::min(first + kLayersPerPattern, numbers.size()));
      targets.push_back(fmt::format("re:{}({}){}", before, fmt::join(begin, end, "|"), after));
    }
  }
  return targets;
}

// The names of linears, and where engines join some into one matrix the joined name as well: an
// engine asks for that one where its model class does not say what it is joined of (vLLM's
// Qwen3-MoE with dense layers by decoder_sparse_step). Experts are found by other names.
std::vector<std::string> with_joined(std::vector<std::string> names) {
  struct Joined {
    std::string_view name, first;
    std::array<std::string_view, 2> others;
  };
  constexpr std::array<Joined, 2> kJoined = {{{"gate_up_proj", "gate_proj", {"up_proj", "up_proj"}},
                                              {"qkv_proj", "q_proj", {"k_proj", "v_proj"}}}};
  const std::set<std::string, std::less<>> stated(names.begin(), names.end());
  for (const std::string& name : stated) {
    const std::string block = name.substr(0, name.rfind('.') + 1);  // empty without a dot
    if (block.find(".experts.") != std::string::npos) continue;
    for (const Joined& joined : kJoined) {
      if (name != std::string(block).append(joined.first)) continue;
      const bool all =
          std::all_of(joined.others.begin(), joined.others.end(), [&](std::string_view other) {
            return stated.contains(std::string(block).append(other));
          });
      std::string added = std::string(block).append(joined.name);
      if (all && !stated.contains(added) && !MOESAIC_FAULT(convert_joined_names_left_out)) {
        names.push_back(std::move(added));
      }
    }
  }
  return names;
}

// The linears that stay plain, for a skip list. A head that shares the embedding's weights has no
// tensor of its own.
std::vector<std::string> skip_list(const ConvertedModules& modules) {
  std::vector<std::string> list = with_joined(modules.plain);
  const auto is_head = [](const std::string& name) { return name == "lm_head"; };
  if (std::none_of(list.begin(), list.end(), is_head) &&
      std::none_of(modules.quantized.begin(), modules.quantized.end(), is_head)) {
    list.emplace_back("lm_head");
  }
  return list;
}

// FP8 blocks beside FP8 blocks: the source's description, which now holds for the experts as well.
Json extended_fp8(const SourceQuantization& source, const ConvertedModules& modules) {
  Json json = source.json;
  const bool left_out = std::any_of(modules.experts.begin(), modules.experts.end(),
                                    [](const auto& experts) { return experts.plain; });
  if (left_out && !MOESAIC_FAULT(convert_keeps_skip_list)) {
    json.erase("ignored_layers");
    json["modules_to_not_convert"] = skip_list(modules);
  }
  return json;
}

// Both of compressed-tensors: a group for the experts, and the source's groups with the names of
// their linears in place of classes and patterns, which might have meant experts too.
Result<Json> merged_groups(const SourceQuantization& source, const ConvertedModules& modules,
                           ConvertFormat format) {
  const Json ours = quantization_config(format, skip_list(modules), false);
  std::map<std::string, std::vector<std::string>> members;
  for (const std::string& module : modules.quantized) {
    const QuantGroup* group = group_of(source.parsed, module);
    if (group == nullptr || skips_module(source.parsed, module)) {
      return Status(StatusCode::kAmbiguousFormat,
                    fmt::format("convert: {} has scales of a quantised linear, but "
                                "quantization_config leaves it out",
                                quote_name(module)));
    }
    members[group->name].push_back(module);
  }
  Json groups = Json::object();
  Json first = ours["config_groups"]["group_0"];
  first["targets"] = expert_targets(modules);
  bool mixed = false;
  groups["group_0"] = std::move(first);
  for (const auto& [name, old] : source.json["config_groups"].items()) {
    const auto found = members.find(name);
    if (found == members.end()) continue;
    Json group = old;
    if (!group.contains("format") || group["format"].is_null()) {
      group["format"] = source.json["format"];
    }
    mixed = mixed || group["format"] != ours["format"];
    group["targets"] = with_joined(found->second);
    groups[fmt::format("group_{}", groups.size())] = std::move(group);
  }
  Json json = source.json;
  json["config_groups"] = std::move(groups);
  json["format"] = mixed ? Json("mixed-precision") : ours["format"];
  json["ignore"] = ours["ignore"];
  return json;
}

Json parts(const SourceQuantization& source, const ConvertedModules& modules) {
  std::vector<std::string> experts;
  for (const ConvertedModules::Experts& e : modules.experts) experts.push_back(e.module);
  Json others = without_entries_of(source.json, experts);
  return {{kExpertsPart,
           {{"modules", std::move(experts)},
            {"quantization_config", quantization_config(modules.format, {}, modules.own_mxfp4)}}},
          {kOthersPart, {{"quantization_config", std::move(others)}}}};
}

bool states_cache(const Json& json) {
  if (!json.is_object()) return false;
  const auto stated = [&](const char* key) { return json.contains(key) && !json[key].is_null(); };
  return stated("kv_cache_scheme") || stated("kv_cache_quant_algo");
}

}  // namespace

Result<SourceQuantization> read_source_quantization(const std::string& directory,
                                                    std::string_view config) {
  MOESAIC_ASSIGN_OR_RETURN(const Json whole, parse_config(config));
  SourceQuantization source;
  source.json = stated_in_config(whole);
  if (source.json.is_null()) {
    MOESAIC_ASSIGN_OR_RETURN(source.json, stated_in_side_file(directory));
  }
  if (source.json.is_null()) return source;
  if (source.json.contains(kOthersPart)) {  // it opened, so both parts are whole
    source.json = Json(source.json[kOthersPart]["quantization_config"]);
  }
  const nlohmann::json unordered = {{kDescriptions[0], nlohmann::json::parse(source.json.dump())}};
  MOESAIC_ASSIGN_OR_RETURN(source.parsed, parse_quant_config(unordered));
  return source;
}

Result<ConvertedQuantization> describe_conversion(const SourceQuantization& source,
                                                  const ConvertedModules& modules) {
  ConvertedQuantization made;
  made.format = modules.format;
  const bool others = !modules.quantized.empty() || modules.kv_scales || states_cache(source.json);
  if (!others || MOESAIC_FAULT(convert_describes_experts_only)) {
    made.json = quantization_config(modules.format, skip_list(modules), modules.own_mxfp4);
    return made;
  }
  if (source.json.is_null()) {
    return Status(StatusCode::kAmbiguousFormat,
                  fmt::format("convert: {} has scales of a quantised linear, but no "
                              "quantization_config says how it is stored",
                              modules.quantized.empty() ? "the attention's cache"
                                                        : quote_name(modules.quantized.front())));
  }
  const std::string method = method_of(source.json);
  // One description holds for both where the blocks have the same size.
  const bool blocks = source.parsed.linear.stored == StoredFormat::kFp8Block &&
                      (source.parsed.linear.block == quant::BlockShape{} ||
                       MOESAIC_FAULT(convert_other_blocks_under_the_source_size));
  if (method == "fp8" && blocks && modules.format == ConvertFormat::kFp8Block) {
    // Readers trust scale_fmt that all scales are powers of two, the experts' too.
    if (source.parsed.linear.ue8m0) made.format = ConvertFormat::kFp8BlockPowers;
    made.json = extended_fp8(source, modules);
    return made;
  }
  if (method == "compressed-tensors" && !modules.own_mxfp4) {
    if (modules.format == ConvertFormat::kFp8Block) {
      made.format = ConvertFormat::kFp8BlockCompressed;
    }
    MOESAIC_ASSIGN_OR_RETURN(made.json, merged_groups(source, modules, made.format));
    return made;
  }
  made.json = parts(source, modules);
  made.notes.push_back(fmt::format(
      "linears outside the routed experts stay as they are ({}); no description that other "
      "engines read fits both, so quantization_config has one for each part and no quant_method",
      method));
  return made;
}

Result<std::string> converted_config(std::string_view config, const Json& quantization) {
  MOESAIC_ASSIGN_OR_RETURN(Json json, parse_config(config));
  for (Json* holder : holders(&json)) {
    for (const char* key : kDescriptions) holder->erase(key);
  }
  json[kDescriptions[0]] = quantization;
  const std::string text = json.dump(2);
  if (text.size() > kMaxConfigBytes && !MOESAIC_FAULT(convert_writes_any_config)) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("convert: config.json of the result would have {} bytes, and at most "
                              "{} are read: need a shorter config.json",
                              text.size(), kMaxConfigBytes));
  }
  return unquote_python_constants(text) + "\n";
}

}  // namespace moesaic::checkpoint
