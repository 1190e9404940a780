#include "spec_text.h"

#include <fmt/format.h>

#include "router/router_checks.h"

namespace moesaic::tool {

std::string routing_text(const RoutingSpec& routing) {
  // Of no use without a caller's table or function, or named after one.
  const bool with_callers_part = routing.method == RoutingMethod::kHash ||
                                 routing.method == RoutingMethod::kCustom ||
                                 routing.method == RoutingMethod::kSimulated;
  const Result<RoutingSpec> in_force = router::effective_routing(routing);
  if (with_callers_part || !in_force.ok()) return std::string(routing_method_name(routing.method));
  return router::router_name(*in_force, "");
}

std::int64_t shared_experts(const MoeLayerSpec& spec) {
  const std::int64_t width = spec.shared.intermediate_size;
  if (width <= 0) return 0;
  const bool whole = spec.intermediate_size > 0 && width % spec.intermediate_size == 0;
  return whole && !spec.shared.gated_output ? width / spec.intermediate_size : 1;
}

std::string describe_name(const MoeLayerSpec& spec) {
  std::string text = spec.model_type.empty() ? spec.prefix : spec.model_type;
  if (spec.layer >= 0) text += fmt::format(" layer {}", spec.layer);
  return text + ", " + routing_text(spec.routing);
}

std::string describe_sizes(const MoeLayerSpec& spec) {
  std::string text = fmt::format("{} experts, {} per token, hidden {}, intermediate {}, {}",
                                 spec.num_experts, spec.routing.top_k, spec.hidden_size,
                                 spec.intermediate_size, activation_name(spec.activation.kind));
  if (spec.shared.intermediate_size > 0) {
    text += fmt::format(", {} shared{}", shared_experts(spec),
                        spec.shared.gated_output ? " (gated)" : "");
  }
  if (!spec.quant.name.empty()) text += fmt::format(", weights {}", spec.quant.name);
  return text;
}

std::string describe(const MoeLayerSpec& spec) {
  return describe_name(spec) + ": " + describe_sizes(spec);
}

}  // namespace moesaic::tool
