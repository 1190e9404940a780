// MoeLayerSpec: everything about one MoE layer that a configuration file or an engine states, as
// plain data. Symbols: M tokens, H hidden_size, I intermediate_size (full, before tensor
// parallelism), E num_experts, k top_k.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "moesaic/activation.h"
#include "moesaic/dtype.h"
#include "moesaic/kinds.h"
#include "moesaic/quant.h"

namespace moesaic {

// How router logits become topk_ids and topk_weights. Source: docs/spec/routing.md.
struct RoutingSpec {
  RoutingMethod method = RoutingMethod::kTopK;
  ScoringFunc scoring_func = ScoringFunc::kSoftmax;
  std::int64_t num_experts = 0;  // real (logical) experts E
  // Identity experts behind them; logits have num_experts + num_zero_experts columns.
  std::int64_t num_zero_experts = 0;
  std::int64_t top_k = 0;
  bool renormalize = false;
  std::int64_t num_expert_group = 1;
  std::int64_t topk_group = 1;
  // kGroupedTopK: groups are ranked by the sum of their two best experts even without a correction
  // bias (with one they always are); false: by their best one.
  bool group_by_best_two = false;
  bool has_correction_bias = false;  // e_score_correction_bias takes part in selection
  // kTopK: weights are finally multiplied by a factor of their expert (Gemma 4).
  bool has_expert_scale = false;
  double routed_scaling_factor = 1.0;
  // True: the layer scales the routed output; false: the router scales its weights.
  bool scale_on_output = false;
  double p_norm = 1.0;       // kPNorm
  double jitter_eps = 0.01;  // kSparseMixer
  // Renormalisation divides by max(sum, renorm_floor) when this is > 0 (ERNIE: 1e-12).
  double renorm_floor = 0.0;
  double renorm_epsilon = 0.0;  // renormalisation adds this to the sum (LFM2: 1e-6)
};

// One shared (always active) expert MLP in addition to the routed ones; intermediate_size 0 means
// that there is none.
struct SharedExpertSpec {
  std::int64_t intermediate_size = 0;
  bool gated_output = false;  // multiply by sigmoid(x . shared_expert_gate)
  // The checkpoint keeps it outside the block whose name is MoeLayerSpec::prefix, so that the
  // block's own output (what a golden file records) is without it.
  bool beside_block = false;
  std::optional<ActivationSpec> activation;  // where it differs from the layer's
};

struct MoeLayerSpec {
  std::string model_type;  // "deepseek_v3", ... ; empty when built by hand
  int layer = -1;          // 0-based index in the model, -1 when built by hand
  std::string prefix;      // name of the block, for example "model.layers.3.mlp"
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_experts = 0;
  RoutingSpec routing;
  ActivationSpec activation;
  SharedExpertSpec shared;
  Scheme quant;  // of the routed experts, as stored
  // What the checkpoint says of quantisation and is read or computed otherwise, in words; empty:
  // nothing.
  std::string quant_note;
  // Dtype of hidden states and of the layer's intermediate roundings.
  DType activation_dtype = DType::kBF16;
  std::int64_t hash_vocabulary = 0;  // RoutingMethod::kHash: rows of the table
  bool has_router_bias = false;
  bool has_expert_bias = false;
  bool apply_router_weight_on_input = false;
  // Above 0: the block takes rows x that are not normalised yet (Gemma 4). With
  // n = x / sqrt(mean(x^2) + input_norm_eps) the router sees n (times weights that are part of
  // gate_weight), the routed experts n * experts_norm_weight; a shared expert sees x.
  double input_norm_eps = 0.0;
};

std::string_view routing_method_name(RoutingMethod method);
std::string_view scoring_func_name(ScoringFunc func);
// Internal consistency: 1 <= k <= E + zero experts, groups divide E, sizes >= 1 ... Names the
// field, value and need.
Status validate(const MoeLayerSpec& spec);

}  // namespace moesaic
