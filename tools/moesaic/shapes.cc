#include "shapes.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <span>

#include "core/nearest_name.h"

namespace moesaic::tool {
namespace {

struct NamedShape {
  std::string_view name;
  std::int64_t num_experts, top_k, hidden_size, intermediate_size;
  RoutingMethod method;
  ScoringFunc scoring_func;
  bool renormalize;
  bool has_correction_bias;
  std::int64_t num_expert_group, topk_group;
  double routed_scaling_factor;
  std::int64_t shared_intermediate_size;
  bool is_gpt_oss;  // swigluoai, router and expert biases
};

constexpr auto kTopK = RoutingMethod::kTopK;
constexpr auto kGrouped = RoutingMethod::kGroupedTopK;
constexpr auto kTopKSoftmax = RoutingMethod::kTopKSoftmax;
constexpr auto kSoftmax = ScoringFunc::kSoftmax;
constexpr auto kSigmoid = ScoringFunc::kSigmoid;

// Sizes, groups and factors as in the config.json of the released models.
constexpr std::array<NamedShape, 7> kShapes = {{
    {"deepseek-v3", 256, 8, 7168, 2048, kGrouped, kSigmoid, true, true, 8, 4, 2.5, 2048, false},
    {"kimi-k2", 384, 8, 7168, 2048, kTopK, kSigmoid, true, true, 1, 1, 2.827, 2048, false},
    {"qwen3-235b", 128, 8, 4096, 1536, kTopK, kSoftmax, true, false, 1, 1, 1.0, 0, false},
    {"qwen3-30b", 128, 8, 2048, 768, kTopK, kSoftmax, true, false, 1, 1, 1.0, 0, false},
    {"mixtral-8x7b", 8, 2, 4096, 14336, kTopK, kSoftmax, true, false, 1, 1, 1.0, 0, false},
    {"gpt-oss-120b", 128, 4, 2880, 2880, kTopKSoftmax, kSoftmax, false, false, 1, 1, 1.0, 0, true},
    {"minimax-m2", 256, 8, 3072, 1536, kTopK, kSigmoid, true, true, 1, 1, 1.0, 0, false},
}};

MoeLayerSpec spec_of(const NamedShape& shape) {
  MoeLayerSpec spec;
  spec.prefix = std::string(shape.name);
  spec.hidden_size = shape.hidden_size;
  spec.intermediate_size = shape.intermediate_size;
  spec.num_experts = shape.num_experts;
  spec.routing.method = shape.method;
  spec.routing.scoring_func = shape.scoring_func;
  spec.routing.num_experts = shape.num_experts;
  spec.routing.top_k = shape.top_k;
  spec.routing.renormalize = shape.renormalize;
  spec.routing.num_expert_group = shape.num_expert_group;
  spec.routing.topk_group = shape.topk_group;
  spec.routing.has_correction_bias = shape.has_correction_bias;
  spec.routing.routed_scaling_factor = shape.routed_scaling_factor;
  spec.shared.intermediate_size = shape.shared_intermediate_size;
  if (shape.is_gpt_oss) spec.activation = make_activation("swigluoai").value();
  spec.has_router_bias = shape.is_gpt_oss;
  spec.has_expert_bias = shape.is_gpt_oss;
  return spec;
}

Result<std::int64_t> parse_count(std::string_view field, std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("--shape: {}: got '{}', need a whole number >= 1", field, text));
  }
  return value;
}

Result<MoeLayerSpec> spec_from_list(std::string_view text) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, comma - begin));
    begin = comma + 1;
  }
  if (parts.size() != 4 && parts.size() != 5) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("--shape: got {} fields in '{}', need E,k,H,I or E,k,H,I,activation",
                              parts.size(), text));
  }
  MoeLayerSpec spec;
  MOESAIC_ASSIGN_OR_RETURN(spec.num_experts, parse_count("E (experts)", parts[0]));
  MOESAIC_ASSIGN_OR_RETURN(spec.routing.top_k, parse_count("k (experts per token)", parts[1]));
  MOESAIC_ASSIGN_OR_RETURN(spec.hidden_size, parse_count("H (hidden size)", parts[2]));
  MOESAIC_ASSIGN_OR_RETURN(spec.intermediate_size, parse_count("I (intermediate size)", parts[3]));
  spec.prefix = std::string(text);
  spec.routing.num_experts = spec.num_experts;
  spec.routing.renormalize = true;
  if (parts.size() == 5) {
    // Some have constants that a shape cannot state: refused by the field's name.
    const Result<ActivationSpec> activation = make_activation(parts[4]);
    if (!activation.ok()) return activation.status().with_context("--shape");
    spec.activation = *activation;
  }
  MOESAIC_RETURN_IF_ERROR(validate(spec).with_context("--shape"));
  return spec;
}

}  // namespace

std::vector<std::string_view> shape_names() {
  std::vector<std::string_view> names;
  names.reserve(std::size(kShapes));
  for (const NamedShape& shape : kShapes) names.push_back(shape.name);
  return names;
}

Status layer_beside_shape(int layer) {
  return {StatusCode::kInvalidArgument,
          fmt::format("--layer: got {} beside --shape, which is one layer; need --model", layer)};
}

Result<MoeLayerSpec> layer_from_shape(std::string_view text) {
  for (const NamedShape& shape : kShapes) {
    if (shape.name == text) {
      MoeLayerSpec spec = spec_of(shape);
      MOESAIC_ASSIGN_OR_RETURN(spec.quant, quant_scheme_from_name("bf16"));
      return spec;
    }
  }
  if (text.find(',') != std::string_view::npos) {
    MOESAIC_ASSIGN_OR_RETURN(MoeLayerSpec spec, spec_from_list(text));
    MOESAIC_ASSIGN_OR_RETURN(spec.quant, quant_scheme_from_name("bf16"));
    return spec;
  }
  const std::vector<std::string_view> names = shape_names();
  return Status(StatusCode::kNotFound,
                fmt::format("--shape: got '{}', need one of {} or E,k,H,I[,activation]; nearest is "
                            "'{}'",
                            text.substr(0, 64), fmt::join(names, ", "), nearest_name(text, names)));
}

}  // namespace moesaic::tool
