// Layers that the tests of the layer compute on: one per feature of the families.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "moesaic/fused_moe.h"

namespace moesaic::test {

// E 8, k 2, H 64, I 32, softmax top-k, bf16 weights. Tests change what they are about before they
// call make_layer.
MoeLayerSpec small_spec();

// small_spec with a shared expert of 48 columns.
MoeLayerSpec with_shared(bool gated);

// A gated shared expert, and the routed result times 2.5.
MoeLayerSpec scaled_output();

// Sigmoid scores with a correction bias, best experts of the best groups, weights scaled by 2.5.
void use_grouped_routing(RoutingSpec& routing, std::int64_t groups, std::int64_t topk_group);

// A shared expert and grouped routing, 2 of 4 groups.
MoeLayerSpec deepseek_like();

// Top-1 with the weight on the input, and a shared expert.
MoeLayerSpec llama4_like();

// Identity experts beside the real ones, three slots a row.
MoeLayerSpec with_identity_experts();

// Experts by token id, from a table of 11 rows.
MoeLayerSpec hash_routed();

struct Feature {
  std::string name;
  std::function<MoeLayerSpec()> spec;
};
// What every backend computes: plain, shared, gated shared, deepseek, llama4.
std::vector<Feature> common_features();

// A layer for every routing method whose ids follow from the logits: those above, and all others.
std::vector<Feature> routing_features();

// Options of a layer on the first GPU.
FusedMoE::Options on_gpu(std::int64_t max_tokens = 512);

}  // namespace moesaic::test
