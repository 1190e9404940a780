// Float64 oracle of the experts stage: every sum, activation and combination in double, written
// independently of src/ (its own codecs, quantiser and activations).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moesaic/experts.h"
#include "moesaic/tensor.h"

namespace moesaic::test {

struct OracleOptions {
  // false: exact arithmetic on the weights as stored and the hidden states as given; nothing is
  //        rounded. The truth that QuantScheme::output_bound speaks of.
  // true:  hidden states, a weight on the input and the activation's result are rounded and
  //        quantised exactly as the scheme says (operands equal those of a backend except where
  //        fp32 and float64 sums land on different sides of a rounding boundary); sums stay double.
  bool round_like_scheme = false;
};

// One expert on one row: x [H] -> [H], biases included, no router weight.
//   scale_input  weight on input (1: none)
std::vector<double> oracle_expert(const MoeProblem& problem, const StackedExpertWeights& weights,
                                  std::int64_t local_expert, std::span<const double> x,
                                  double scale_input, const OracleOptions& options);

// Standard format: x [M, H], ids [M, k] I32, topk_weights [M, k] F32, expert_map [E] or empty.
// Returns [M, H]; slots with id -1 or a remote expert contribute nothing.
std::vector<double> oracle_moe(const MoeProblem& problem, const StackedExpertWeights& weights,
                               ConstTensorView x, ConstTensorView ids, ConstTensorView topk_weights,
                               std::span<const std::int32_t> expert_map,
                               const OracleOptions& options = {});

// Batched format: x [E_l, T, H] with counts [E_l]. Returns [E_l, T, H], zero past the counts.
std::vector<double> oracle_batched(const MoeProblem& problem, const StackedExpertWeights& weights,
                                   ConstTensorView x, std::span<const std::int32_t> counts,
                                   const OracleOptions& options = {});

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
