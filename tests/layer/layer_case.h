// Layers made of random tensors, and the float64 truth about them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "layer/layer_specs.h"
#include "moesaic/fused_moe.h"
#include "support/moe_oracle.h"

namespace moesaic::test {

// All tensors of a layer in the formats of its spec; owns them.
struct LayerTensors {
  MoeLayerSpec spec;
  OwnedExpertWeights experts;  // all E of them
  OwnedExpertWeights shared;   // E = 1
  Tensor gate_weight, gate_bias, correction_bias, shared_gate_weight;
  Tensor experts_norm_weight, expert_scale, hash_table;

  // What Checkpoint::load_layer would return (one rank); the tensors are copied, but the source
  // views this object.
  MoeLayerWeights weights() const;
};
LayerTensors make_tensors(std::uint64_t seed, const MoeLayerSpec& spec);
// `spec` of a model in `dtype` with experts as `quant` says, in sizes that all formats have.
LayerTensors model_in(DType dtype, std::string_view quant, MoeLayerSpec spec);

FusedMoE make_layer(const LayerTensors& tensors, const FusedMoE::Options& options = {});

Tensor random_hidden(std::uint64_t seed, std::int64_t tokens, std::int64_t hidden,
                     DType dtype = DType::kBF16);

// forward() into a poisoned output with all traces.
struct LayerRun {
  Tensor output, logits, topk_weights, topk_ids;
};
LayerRun run_layer(const FusedMoE& layer, const Tensor& hidden_states,
                   DType output_dtype = DType::kF32);
// The same with whatever else `args` brings; its output and traces are set here (no logits where
// ids are given).
Result<LayerRun> run_args(const FusedMoE& layer, FusedMoE::Args args,
                          DType output_dtype = DType::kF32);

// The same where nothing is to be refused.
LayerRun must_run(const FusedMoE& layer, const FusedMoE::Args& args,
                  DType output_dtype = DType::kF32);

// Routed and shared experts in float64 on the ids and weights that `run` reports.
//   output_scale  factor on the routed result
std::vector<double> layer_oracle(const LayerTensors& t, const Tensor& hidden_states,
                                 const LayerRun& run, double output_scale = 1.0);

// A copy of everything that `source` yields, stacked.
OwnedExpertWeights collect(ExpertSource& source, std::int64_t experts);

}  // namespace moesaic::test
