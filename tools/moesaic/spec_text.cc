#include "spec_text.h"

#include <fmt/format.h>

#include <vector>

#include "moesaic/router.h"

namespace moesaic::tool {

std::string routing_text(const RoutingSpec& routing) {
  Router::Options options;
  options.spec = routing;
  // The values of these vectors do not matter for a name, their presence does.
  std::vector<float> zeros;
  const std::int64_t experts = routing.num_experts + routing.num_zero_experts;
  if (experts > 0) {
    zeros.resize(static_cast<std::size_t>(experts));
    const ConstTensorView vector(reinterpret_cast<const std::byte*>(zeros.data()), DType::kF32,
                                 {experts});
    if (routing.has_correction_bias) options.correction_bias = vector;
    if (routing.has_expert_scale) options.expert_scale = vector;
  }
  const Result<Router> router = Router::create(options);
  return router.ok() ? router->name() : std::string(routing_method_name(routing.method));
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
