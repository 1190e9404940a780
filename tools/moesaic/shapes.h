// Layers that need no checkpoint: named shapes of released models, and E,k,H,I[,activation].
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic::tool {

// "deepseek-v3", "kimi-k2", ... in the order of --help.
std::vector<std::string_view> shape_names();

// The layer that `text` names, with the routing, activation, biases and shared experts of the
// released model and plain BF16 weights (--quant states anything else). A list E,k,H,I[,activation]
// is a softmax layer that renormalises, without biases or shared experts. kNotFound names the
// nearest shape, kInvalidArgument the field of a list that is wrong.
Result<MoeLayerSpec> layer_from_shape(std::string_view text);

// The refusal of --layer where a shape is the whole layer.
Status layer_beside_shape(int layer);

}  // namespace moesaic::tool
