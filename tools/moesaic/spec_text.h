// Words for parts of a MoeLayerSpec, as inspect, explain and demo print them.
#pragma once

#include <cstdint>
#include <string>

#include "moesaic/spec.h"

namespace moesaic::tool {

// The router's own name for the method ("sigmoid_bias_grouped_topk"), or the method's plain name
// when such a router cannot be built without a caller's tables or functions.
std::string routing_text(const RoutingSpec& routing);
// How many shared experts of the routed experts' width the layer has; a shared expert of another
// width counts as one.
std::int64_t shared_experts(const MoeLayerSpec& spec);
// "deepseek_v3 layer 1, sigmoid_bias_grouped_topk_renorm"
std::string describe_name(const MoeLayerSpec& spec);
// "16 experts, 4 per token, hidden 256, intermediate 128, silu, 1 shared, weights bf16"
std::string describe_sizes(const MoeLayerSpec& spec);
// Both in a line.
std::string describe(const MoeLayerSpec& spec);

}  // namespace moesaic::tool
