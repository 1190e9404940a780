// Everything about a FusedMoE that follows from its spec and options alone: the problems its stages
// solve, where factors act, which rank adds what. Pure; shared by building and explaining.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gate/rounding.h"
#include "layer/quant_selection.h"
#include "layer/rank_plan.h"
#include "moesaic/device.h"
#include "moesaic/experts.h"
#include "moesaic/fused_moe.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic::layer {

struct FusedPlan {
  QuantPlan quant, shared_quant;
  MoeProblem routed;  // as the kernel sees it: with slots as rows, its top_k is 1
  MoeProblem shared;  // E = k = 1; valid when has_shared
  std::vector<std::int32_t> expert_map;  // empty: every expert is local, or no layer is made
  RankPlan ranks;
  RoutingSpec routing;            // for the router: its factor is 1 where the layer scales
  float output_scale = 1.0F;      // the layer's factor on the routed result
  bool has_shared = false;        // this rank computes the shared expert
  int shared_slices = 1;          // of the shared expert, one for each rank with the same rows
  bool adds_shared = false;       // that, or the caller's function does
  bool has_zero_experts = false;  // this rank adds the zero experts' share
  std::int64_t hidden_size = 0;   // of hidden states and output
  std::int64_t latent_size = 0;   // of what the routed experts see
  bool has_input_transform = false, has_output_transform = false;
  double input_norm_eps = 0;        // above 0: router and routed experts see normalised rows
  DType rows_dtype = DType::kBF16;  // of the model's hidden states, whatever experts make of them
  bool has_router_bias = false;
  bool inplace = false;              // the output may be the hidden states
  bool shared_stream = false;        // FusedMoE::Options::shared_stream
  bool has_gate = true;              // else every call brings its routing
  std::string backend;               // FusedMoE::Options::backend
  std::int64_t hash_vocabulary = 0;  // rows of the table of RoutingMethod::kHash
  DType gate_dtype = DType::kBF16;   // of the gate's weight; BF16 until the weights are there
  DType router_logits_dtype = DType::kF32;
  bool gate_force_fp32_compute = true;

  // What the gate's sums go through; from when gate_dtype is known.
  gate::LogitRounding logit_rounding() const {
    return {gate_force_fp32_compute ? DType::kF32 : gate_dtype, router_logits_dtype};
  }
};

//   shared_stored  how the shared expert is stored (may differ from spec.quant)
// Errors: those of validate(spec), plan_quant and ParallelConfig; kInvalidArgument for option
// values; kUnsupported for combinations (named).
Result<FusedPlan> plan_fused_moe(const MoeLayerSpec& spec, const Scheme& shared_stored,
                                 const FusedMoE::Options& options);
// The same with what takes memory by the number of experts: of a layer that is made, not explained.
Result<FusedPlan> plan_made_layer(const MoeLayerSpec& spec, const Scheme& shared_stored,
                                  const FusedMoE::Options& options);

}  // namespace moesaic::layer
