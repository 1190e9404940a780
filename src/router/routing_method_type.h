// Two pure decisions of the original's router factory: which router a configuration gets, and which
// RoutingMethodType monolithic kernels are told. Neither changes what the modular path computes.
// Source: docs/spec/routing.md sections 2.1 and 2.2.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic {

// The numbers are part of the interface of fused kernels.
enum class RoutingMethodType : int {
  kDefault = 0,           // softmax -> top-k
  kRenormalize = 1,       // top-k on logits -> softmax over the selected
  kDeepSeekV3 = 2,        // sigmoid + bias -> top-2 sums of groups -> top-k -> renormalise
  kLlama4 = 3,            // top-1 -> sigmoid
  kRenormalizeNaive = 4,  // softmax -> top-k -> renormalise
  kTopK = 5,              // raw top-k values
  kSigmoidRenorm = 6,     // sigmoid -> top-k -> renormalise
  kMiniMax2 = 7,          // sigmoid + bias, ungrouped -> top-k -> renormalise, unscaled
  kSigmoid = 8,           // sigmoid -> top-k
  kUnspecified = 9,
  kDeepseekV4 = 100,  // sqrtsoftplus (+ bias or hash) + renormalise
  kCustom = 101,
  kSimulated = 102,
};
std::string_view routing_method_type_name(RoutingMethodType type);

// num_expert_group unset or 0: ungrouped. routed_scaling_factor unset counts as 1. top_k is
// accepted and not consulted (older versions called sigmoid with k = 1 Llama4).
RoutingMethodType derive_routing_method_type(ScoringFunc scoring, std::int64_t top_k,
                                             bool renormalize,
                                             std::optional<std::int64_t> num_expert_group,
                                             bool has_bias,
                                             std::optional<double> routed_scaling_factor);
// The type of a layer as this library describes it.
RoutingMethodType routing_method_type(const RoutingSpec& spec);

enum class RouterKind : std::uint8_t {
  kSimulator,
  kZeroExpert,
  kGrouped,
  kCustom,
  kBiasedTopK,
  kTopK
};

// What the factory looks at.
struct RouterFactoryInputs {
  bool simulation_strategy = false;
  bool zero_expert_type = false;
  bool use_grouped_topk = false;
  std::optional<std::int64_t> num_expert_group;
  std::optional<std::int64_t> topk_group;
  bool custom_routing_function = false;
  bool has_bias = false;
  bool has_hash_table = false;
  ScoringFunc scoring = ScoringFunc::kSoftmax;
  std::int64_t top_k = 1;
  bool renormalize = false;
  std::optional<double> routed_scaling_factor;
};
// First match of: simulator, zero experts, grouped (dropped again when its type is Unspecified and
// there is one group only), custom, biased (bias or hash table), plain. kInvalidArgument for zero
// experts without a bias, grouping without both group numbers or together with a custom function,
// and a plain router with sqrtsoftplus scoring.
Result<RouterKind> choose_router(const RouterFactoryInputs& inputs);

}  // namespace moesaic
