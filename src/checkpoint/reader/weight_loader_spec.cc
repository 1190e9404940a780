// What a WeightLoader is made from: a model's configuration, or a layer described by hand.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/config/config.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "checkpoint/reader/side_files.h"
#include "checkpoint/reader/weight_loader_impl.h"
#include "core/fault.h"

namespace moesaic {
namespace {

// A family of one model with one layer; its table refers to the names.
struct HandMadeFamily {
  ExpertNames names;
  checkpoint::Family family;

  HandMadeFamily(const HandMadeFamily&) = delete;
  HandMadeFamily& operator=(const HandMadeFamily&) = delete;
  explicit HandMadeFamily(const ExpertNames& names_in) : names(names_in) {
    family.title = "hand-made";
    family.layer_prefix = "";
    checkpoint::ExpertLayout& layout = family.layouts[0];
    layout.storage = names.storage;
    layout.block = names.block;
    layout.gate = names.gate;
    layout.up = names.up;
    layout.down = names.down;
    layout.weight_suffixes = {names.weight_suffix};
    layout.scale_suffix = names.scale_suffix;
    layout.bias_suffix = names.bias_suffix;
  }
};

Status check_layer_sizes(const MoeLayerSpec& spec) {
  const auto check = [](std::string_view field, std::int64_t value, std::int64_t most) -> Status {
    if (value >= 1 && value <= most) return {};
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: got {}, need 1 to {}", field, value, most)};
  };
  MOESAIC_RETURN_IF_ERROR(check("num_experts", spec.num_experts, checkpoint::kMaxExperts));
  MOESAIC_RETURN_IF_ERROR(check("hidden_size", spec.hidden_size, checkpoint::kMaxWidth));
  return check("intermediate_size", spec.intermediate_size, checkpoint::kMaxWidth);
}

Status check_expert_names(const ExpertNames& names) {
  const auto invalid = [](std::string_view field, std::string_view got, std::string_view need) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("names.{}: got \"{}\", need {}", field, got, need));
  };
  if (names.block.empty()) return invalid("block", "", "what the tensors' names begin with");
  if (names.storage > ExpertStorage::kFusedNTInterleaved) {
    return invalid("storage", fmt::to_string(static_cast<int>(names.storage)), "an ExpertStorage");
  }
  const bool fused = checkpoint::is_fused(names.storage);
  if (names.up.empty() != fused) {
    return invalid("up", names.up, fused ? "none, gate and up are one tensor" : "a module");
  }
  if (fused && names.gate.empty()) return invalid("gate", "", "the module of gate and up");
  if (names.down.empty()) return invalid("down", "", "a module");
  const bool single = checkpoint::is_per_expert(names.storage);
  for (const auto& [field, module] :
       {std::pair<std::string_view, std::string_view>{"gate", names.gate},
        {"up", names.up},
        {"down", names.down}}) {
    const std::size_t number = module.find("{e}");
    const bool once = number != module.npos && number == module.rfind("{e}");
    if (module.empty() || (single ? once : number == module.npos)) continue;
    return invalid(field, module,
                   single ? "\"{e}\" once, where the expert's number is"
                          : "no \"{e}\", all experts are in one tensor");
  }
  return {};
}

// What a file says depends on its name.
Status check_side_file(std::string_view name) {
  const auto& known = checkpoint::kSideFiles;
  const bool is_known = std::find(known.begin(), known.end(), name) != known.end();
  if (is_known || MOESAIC_FAULT(pushed_side_file_of_any_name)) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("side_files: got {}, need one of {}", checkpoint::quote_name(name),
                      fmt::join(known, ", "))};
}

// quantization_config as an object inside a configuration that says nothing else.
Result<checkpoint::QuantConfig> parse_quantization(std::string_view json) {
  if (json.empty()) return checkpoint::QuantConfig{};
  MOESAIC_ASSIGN_OR_RETURN(
      nlohmann::json object,
      checkpoint::parse_json_document("quantization_config", json,
                                      {checkpoint::kMaxConfigBytes, checkpoint::kMaxConfigDepth}));
  nlohmann::json top = nlohmann::json::object();
  top["quantization_config"] = std::move(object);
  return checkpoint::parse_quant_config(top);
}

}  // namespace

Result<WeightLoader> WeightLoader::from_config(std::string_view config_json, int index,
                                               const Options& options) {
  return checkpoint::guard_allocation("config.json", [&]() -> Result<WeightLoader> {
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::ModelConfig config,
                             checkpoint::parse_model_config(config_json));
    checkpoint::SideFiles files(&config.quant);
    for (const auto& [name, json] : options.side_files) {
      MOESAIC_RETURN_IF_ERROR(check_side_file(name));
      MOESAIC_RETURN_IF_ERROR(files.add(name, json));
    }
    return make(std::move(config), index, options);
  });
}

Result<WeightLoader> WeightLoader::from_spec(const MoeLayerSpec& spec, const ExpertNames& names,
                                             std::string_view quantization_config,
                                             const Options& options) {
  return checkpoint::guard_allocation("weight loader", [&]() -> Result<WeightLoader> {
    MOESAIC_RETURN_IF_ERROR(check_layer_sizes(spec));
    MOESAIC_RETURN_IF_ERROR(check_expert_names(names));
    const bool gated = is_gated(spec.activation.kind);
    if (!checkpoint::is_fused(names.storage) && names.gate.empty() == gated) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("names.gate: got \"{}\", the activation {} needs {}", names.gate,
                                activation_name(spec.activation.kind), gated ? "one" : "none"));
    }
    if (spec.has_expert_bias && checkpoint::is_per_expert(names.storage) &&
        !MOESAIC_FAULT(pushed_biases_of_single_experts)) {
      return Status(
          StatusCode::kUnsupported,
          "has_expert_bias: got true with experts one by one, need a storage in which all "
          "are in one tensor");
    }
    auto owned = std::make_shared<const HandMadeFamily>(names);
    checkpoint::ModelConfig config;
    config.model_type = spec.model_type;
    config.family = &owned->family;
    config.stated_dtype = spec.activation_dtype;
    MOESAIC_ASSIGN_OR_RETURN(config.quant, parse_quantization(quantization_config));
    config.layers = {spec};
    config.layers[0].prefix = names.block;
    Options experts = options;
    experts.experts_only = true;
    MOESAIC_ASSIGN_OR_RETURN(WeightLoader loader, make(std::move(config), spec.layer, experts));
    MOESAIC_RETURN_IF_ERROR(loader.impl_->check_names_differ());
    loader.impl_->owner = std::move(owned);
    return loader;
  });
}

}  // namespace moesaic
