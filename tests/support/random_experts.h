// Random expert weights in every scheme, and random routing.
#pragma once

#include <cstdint>

#include "moesaic/experts.h"
#include "moesaic/tensor.h"

namespace moesaic::test {

// Stacked random weights for a problem: w13 and w2 with a standard deviation that gives
// pre-activations and outputs of about 1 for inputs of about 1; biases of about 0.5. fp8 blocks:
// codes from a 128x128 quantiser of this file; every other quantised format: random codes and
// scales.
struct OwnedExpertWeights {
  Tensor w13, w13_scale, w13_bias, w2, w2_scale, w2_bias;
  Tensor w13_global_scale, w2_global_scale, w13_channel_scale, w2_channel_scale;
  Tensor w13_zero, w2_zero, w13_min, w2_min, w13_input_scale, w2_input_scale, w13_perm, w2_perm;
  StackedExpertWeights view() const;
};
OwnedExpertWeights random_expert_weights(std::uint64_t seed, const MoeProblem& problem);

// Random routing: ids distinct inside a row, skewed towards low experts; weights positive with sum
// about 1. A slot is -1 with probability `invalid`.
struct OwnedRouting {
  Tensor ids, weights;
};
OwnedRouting random_routing(std::uint64_t seed, std::int64_t tokens, std::int64_t num_experts,
                            std::int64_t top_k, double invalid = 0.0);

}  // namespace moesaic::test
