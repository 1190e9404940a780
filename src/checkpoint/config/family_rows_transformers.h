// Rows of the table of families: the further models of transformers 5.24 with experts, each
// complete in itself. What a row says is what that code computes;
// tests/checkpoint/family_checkpoints.py has a checkpoint of each. Source: its modelling code and
// configurations.
#pragma once

#include "checkpoint/config/families.h"
#include "checkpoint/config/family_layouts.h"
#include "checkpoint/config/family_rows_biased_sigmoid.h"
#include "checkpoint/config/family_rows_mixtral.h"

namespace moesaic::checkpoint {

// Sigmoid scores without a bias, and a shared expert without a gate.
constexpr Family flint() {
  Family f;
  f.title = "Flint";
  f.model_types = {"flint"};
  f.default_first_dense = 2;
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kSparseStep;
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.renorm = RenormRule::kStated;
  f.routing.default_renorm = true;
  f.shared = SharedRule::kOwnWidth;
  f.shared_layout = kSharedExpert;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  return f;
}

// The softmax is over the selected, the sigmoid is renormalised where the configuration says so.
constexpr Family cohere2_moe() {
  Family f;
  f.title = "Cohere2-MoE";
  f.model_types = {"cohere2_moe"};
  f.has_layer_types = true;
  f.width_fields = {"intermediate_size"};
  f.layer_rule = LayerRule::kFirstDense;
  f.routing.scoring_field = "expert_selection_fn";
  f.routing.renorm = RenormRule::kStatedForSigmoid;
  f.routing.default_renorm = true;
  f.shared = SharedRule::kCount;
  f.shared_count_field = "num_shared_experts";
  f.shared_sum_field = "shared_expert_combination_strategy";
  f.assumed = {{"norm_topk_prob", ""}};  // read with sigmoid scores
  f.shared_layout = kSharedExperts;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  return f;
}

// Routed experts have SiLU whatever hidden_act says, shared ones follow it.
constexpr Family aria() {
  Family f;
  f.title = "Aria";
  f.model_types = {"aria_text"};
  f.width_fields = {"intermediate_size"};
  f.reads_hidden_act = false;
  f.routing.method = RoutingMethod::kTopKSoftmax;
  f.shared = SharedRule::kCount;
  f.shared_count_field = "moe_num_shared_experts";
  f.default_shared_count = 2;
  f.gate_weight = "router.weight";
  f.shared_layout = kSharedExperts;
  ExpertLayout released = fused(ExpertStorage::kFusedNN, "mlp");
  released.gate = "experts.fc1";
  released.down = "experts.fc2";
  released.weight_suffixes = {".weight"};
  f.layouts = {released, fused(ExpertStorage::kFusedNN, "mlp")};
  f.assumed = {{"hidden_act", "\"silu\""}};
  return f;
}

constexpr Family granite_swa() {
  Family f;
  f.title = "Granite-MoE with sliding windows";
  f.model_types = {"granitemoe_swa"};
  f.width_fields = {"intermediate_size"};
  f.routing.method = RoutingMethod::kTopKSoftmax;
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "shared_intermediate_size";
  f.gate_weight = "router.weight";
  f.shared_layout = granite_layout("", "shared_mlp.input_linear", "shared_mlp.output_linear");
  f.shared_beside_block = true;
  f.layouts = {fused_nt("block_sparse_moe"), split_by_quantisers("block_sparse_moe")};
  return f;
}

// gpt-oss with gate and up side by side; its scale of 1 / top_k on the weights and top_k on the
// output cancel.
constexpr Family privacy_filter() {
  Family f = gpt_oss();
  f.title = "OpenAI Privacy Filter";
  f.model_types = {"openai_privacy_filter"};
  ExpertLayout layout = fused(ExpertStorage::kFusedNN, "mlp");
  layout.weight_suffixes = {""};
  layout.bias_suffix = "_bias";
  f.layouts = {layout, gpt_oss_split_layout()};
  f.assumed = {};
  return f;
}

// The language model (thinker) of Qwen3-Omni; what speaks has layers of its own, not read here.
constexpr Family qwen3_omni_moe() {
  Family f;
  f.title = "Qwen3-Omni-MoE";
  f.model_types = {"qwen3_omni_moe_text"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kSparseStep;
  f.routing.renorm = RenormRule::kStated;
  f.routing.default_renorm = true;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  return f;
}

constexpr Family qwen4_exp() {
  Family f = qwen3_omni_moe();
  f.title = "Qwen4 (experimental)";
  f.model_types = {"qwen4_exp_text"};
  f.layer_rule = LayerRule::kEvery;
  f.shared = SharedRule::kOwnWidth;
  f.shared_layout = kSharedExpert;
  f.shared_gate = "shared_expert_gate.weight";
  return f;
}

// Files in Mistral's own names, whose blocks have none: "layers.3.experts.0.w1". Groups of experts
// would be ranked by their two best, without a bias: only one group is computed.
constexpr Family mistral_large4() {
  Family f;
  f.title = "Mistral Large 4";
  f.model_types = {"mistral_large4_text"};
  f.has_layer_types = true;
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kFirstDense;
  f.default_first_dense = 1;
  f.routing.renorm = RenormRule::kAlways;
  f.routing.scale = ScaleRule::kAlways;
  f.shared = SharedRule::kCount;
  f.shared_count_field = "n_shared_experts";
  f.default_shared_count = 1;
  f.shared_layout = shared_mlp("shared_experts.w1", "shared_experts.w3", "shared_experts.w2");
  f.shared_alternative = kSharedExperts;
  f.layer_prefix = "layers.";
  f.layouts = {w123(""), fused_nt("mlp")};
  return f;
}

// Softcapped SwiGLU: the sigmoid sees the gate as it is, the factors gate and up are capped.
constexpr Family inkling2() {
  Family f = without_shared(biased_sigmoid("Inkling 2", {"inkling2_text", "inkling2_loop_text"}));
  f.layer_rule = LayerRule::kEvery;
  f.has_layer_types = false;
  f.routing.renorm = RenormRule::kAlways;
  f.routing.reads_groups = false;
  f.routing.scale_field = "route_scale";
  f.routing.default_scale = 8.0;
  f.reads_hidden_act = false;
  f.activation.kind = ActivationKind::kSitu;
  f.activation.beta = 4.0F;
  f.activation.up_limit = 25.0F;
  f.beta_field = "mlp_gate_softcap";
  f.up_limit_field = "mlp_up_softcap";
  f.layer_prefix = "model.llm.layers.";
  f.correction_bias = {"gate.bias", "gate.e_score_correction_bias"};
  ExpertLayout released = fused(ExpertStorage::kFusedNTInterleaved, "mlp");
  released.gate = "experts.w13_weight";
  released.down = "experts.w2_weight";
  released.weight_suffixes = {""};
  f.layouts = {released, fused_nt("mlp")};
  f.assumed.add({{"hidden_act", "\"silu\""}});
  return f;
}

// Qwen3-MoE's experts in every layer and a shared one that is added as it is.
constexpr Family lara_mini() {
  Family f = qwen3_omni_moe();
  f.title = "Lara-Mini";
  f.model_types = {"lara_mini"};
  f.layer_rule = LayerRule::kEvery;
  f.shared = SharedRule::kOwnWidth;
  f.shared_layout = kSharedExpert;
  return f;
}

}  // namespace moesaic::checkpoint
