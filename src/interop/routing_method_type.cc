// RoutingMethodType and the router factory of the original.
#include "moesaic/interop/routing.h"

namespace moesaic {

std::string_view routing_method_type_name(RoutingMethodType type) {
  switch (type) {
    case RoutingMethodType::kDefault:
      return "Default";
    case RoutingMethodType::kRenormalize:
      return "Renormalize";
    case RoutingMethodType::kDeepSeekV3:
      return "DeepSeekV3";
    case RoutingMethodType::kLlama4:
      return "Llama4";
    case RoutingMethodType::kRenormalizeNaive:
      return "RenormalizeNaive";
    case RoutingMethodType::kTopK:
      return "TopK";
    case RoutingMethodType::kSigmoidRenorm:
      return "SigmoidRenorm";
    case RoutingMethodType::kMiniMax2:
      return "MiniMax2";
    case RoutingMethodType::kSigmoid:
      return "Sigmoid";
    case RoutingMethodType::kUnspecified:
      return "Unspecified";
    case RoutingMethodType::kDeepseekV4:
      return "DeepseekV4";
    case RoutingMethodType::kCustom:
      return "Custom";
    case RoutingMethodType::kSimulated:
      return "Simulated";
  }
  return "unknown";
}

RoutingMethodType derive_routing_method_type(ScoringFunc scoring, std::int64_t /*top_k*/,
                                             bool renormalize,
                                             std::optional<std::int64_t> num_expert_group,
                                             bool has_bias,
                                             std::optional<double> routed_scaling_factor) {
  using Type = RoutingMethodType;
  if (scoring == ScoringFunc::kSqrtSoftplus) {
    return renormalize ? Type::kDeepseekV4 : Type::kUnspecified;
  }
  const bool sigmoid = scoring == ScoringFunc::kSigmoid;
  if (has_bias) {
    if (!sigmoid || !renormalize) return Type::kUnspecified;
    if (num_expert_group.value_or(0) > 0) return Type::kDeepSeekV3;
    return routed_scaling_factor.value_or(1.0) == 1.0 ? Type::kMiniMax2 : Type::kUnspecified;
  }
  if (sigmoid) return renormalize ? Type::kSigmoidRenorm : Type::kSigmoid;
  return renormalize ? Type::kRenormalizeNaive : Type::kDefault;
}

RoutingMethodType routing_method_type(const RoutingSpec& spec) {
  using Type = RoutingMethodType;
  // No kernel multiplies by a factor of the expert.
  if (spec.has_expert_scale) return Type::kUnspecified;
  // With scaling on the output the router itself is built with factor 1.
  const double factor = spec.scale_on_output ? 1.0 : spec.routed_scaling_factor;
  switch (spec.method) {
    case RoutingMethod::kHash:
      // The other types stand for kernels that choose by score.
      if (spec.scoring_func != ScoringFunc::kSqrtSoftplus) return Type::kUnspecified;
      [[fallthrough]];
    case RoutingMethod::kTopK:
      return derive_routing_method_type(spec.scoring_func, spec.top_k, spec.renormalize,
                                        std::nullopt, spec.has_correction_bias, factor);
    case RoutingMethod::kGroupedTopK:
      return derive_routing_method_type(spec.scoring_func, spec.top_k, spec.renormalize,
                                        spec.num_expert_group, spec.has_correction_bias, factor);
    case RoutingMethod::kTopKSoftmax:
      return Type::kRenormalize;
    case RoutingMethod::kLlama4:
      return Type::kLlama4;
    case RoutingMethod::kSparseMixer:  // custom functions in the original
    case RoutingMethod::kPNorm:
    case RoutingMethod::kCustom:
      return Type::kCustom;
    case RoutingMethod::kSimulated:
      return Type::kSimulated;
    case RoutingMethod::kZeroExpert:
      return Type::kUnspecified;
  }
  return Type::kUnspecified;
}

Result<RouterKind> choose_router(const RouterFactoryInputs& in) {
  const auto refuse = [](const char* text) { return Status(StatusCode::kInvalidArgument, text); };
  if (in.simulation_strategy) return RouterKind::kSimulator;
  if (in.zero_expert_type) {
    if (!in.has_bias) {
      return refuse("correction_bias: absent with zero experts, need one over all experts");
    }
    return RouterKind::kZeroExpert;
  }
  if (in.use_grouped_topk) {
    if (in.custom_routing_function) {
      return refuse("custom_routing_function: given with grouped top-k, need none");
    }
    if (!in.num_expert_group || !in.topk_group) {
      return refuse("num_expert_group, topk_group: unset with grouped top-k, need both");
    }
    const RoutingMethodType type =
        derive_routing_method_type(in.scoring, in.top_k, in.renormalize, in.num_expert_group,
                                   in.has_bias, in.routed_scaling_factor);
    if (type != RoutingMethodType::kUnspecified || *in.num_expert_group > 1 || *in.topk_group > 1) {
      return RouterKind::kGrouped;
    }
  }
  if (in.custom_routing_function) return RouterKind::kCustom;
  if (in.has_bias || in.has_hash_table) return RouterKind::kBiasedTopK;
  if (in.scoring == ScoringFunc::kSqrtSoftplus) {
    return refuse(
        "scoring_func: got sqrtsoftplus without a bias or a hash table, need softmax or "
        "sigmoid for the plain router");
  }
  return RouterKind::kTopK;
}

}  // namespace moesaic
