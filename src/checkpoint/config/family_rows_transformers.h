// Rows of the table of families: the further models of transformers 5.23 with experts, each
// complete in itself. What a row says is what that code computes;
// tests/checkpoint/family_checkpoints.py has a checkpoint of each. Source: its modelling code and
// configurations.
#pragma once

#include <string_view>

#include "checkpoint/config/families.h"
#include "checkpoint/config/family_layouts.h"

namespace moesaic::checkpoint {

// Sigmoid scores, a selection bias, renormalised and scaled weights, shared experts in one MLP:
// what most of these models have in common.
constexpr Family biased_sigmoid(std::string_view title, NameList<4> model_types) {
  Family f;
  f.title = title;
  f.model_types = model_types;
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kFirstDense;
  f.default_first_dense = 1;
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.renorm = RenormRule::kStated;
  f.routing.default_renorm = true;
  f.routing.bias = BiasRule::kAlways;
  f.routing.reads_groups = true;
  f.routing.scale = ScaleRule::kAlways;
  f.shared = SharedRule::kCount;
  f.shared_count_field = "n_shared_experts";
  f.default_shared_count = 1;
  f.correction_bias = {"gate.e_score_correction_bias"};
  f.shared_layout = kSharedExperts;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  return f;
}

constexpr Family without_shared(Family f) {
  f.shared = SharedRule::kNone;
  f.shared_count_field = "";
  f.default_shared_count = 0;
  f.shared_layout = {};
  return f;
}

constexpr Family afmoe() {
  Family f = biased_sigmoid("AFMoE", {"afmoe"});
  f.first_dense_field = "num_dense_layers";
  f.routing.renorm = RenormRule::kAlways;
  f.routing.reads_groups = false;
  f.routing.scale_field = "route_scale";
  f.shared_count_field = "num_shared_experts";
  f.default_shared_count = 2;
  f.gate_weight = "router.gate.weight";
  f.correction_bias = {"expert_bias"};
  f.assumed = {{"score_func", "\"sigmoid\""},
               {"route_norm", "true"},
               {"num_expert_groups", "1"},
               {"num_limited_groups", "1"}};
  return f;
}

// The norm behind the block lies beside it in the files; a layer here ends before it.
constexpr Family axk1() {
  Family f = biased_sigmoid("A.X-K1", {"axk1"});
  f.routing.default_n_group = 8;
  f.routing.default_topk_group = 4;
  f.routing.default_scale = 2.5;
  return f;
}

// Its code gives experts outside the chosen groups a score of 0 instead of none, which a biased
// score below 0 loses against: only without groups is the choice what it is everywhere else.
constexpr Family axk2() {
  Family f = biased_sigmoid("A.X-K2", {"axk2"});
  f.routing.reads_groups = false;
  f.routing.default_scale = 2.5;
  return f;
}

constexpr Family bailing_hybrid() {
  Family f = biased_sigmoid("Bailing-Hybrid", {"bailing_hybrid"});
  f.default_first_dense = 2;
  f.routing.renorm_field = "moe_renormalize";
  f.routing.group_fields = {"num_expert_group", "n_group"};
  f.routing.default_n_group = 8;
  f.routing.default_topk_group = 4;
  f.routing.default_scale = 2.5;
  f.shared_count_field = "num_shared_experts";
  f.correction_bias = {"gate.expert_bias", "gate.e_score_correction_bias"};
  return f;
}

constexpr Family beam() {
  Family f = without_shared(biased_sigmoid("Beam", {"beam"}));
  f.default_first_dense = 3;
  f.routing.default_n_group = 8;
  f.routing.default_topk_group = 4;
  f.routing.scale = ScaleRule::kOnOutput;
  f.routing.default_scale = 2.5;
  return f;
}

constexpr Family dots3() {
  Family f = biased_sigmoid("dots3", {"dots3_note_text"});
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "shared_experts_intermediate_size";
  return f;
}

constexpr Family exaone_moe() {
  Family f = biased_sigmoid("EXAONE-MoE", {"exaone_moe"});
  f.routing.default_scale = 2.5;
  f.shared_count_field = "num_shared_experts";
  f.correction_bias = {"e_score_correction_bias", "gate.e_score_correction_bias"};
  return f;
}

constexpr Family glm5_next() {
  Family f = biased_sigmoid("GLM-5-Next", {"glm5_next_text"});
  f.default_first_dense = 3;
  f.routing.default_scale = 2.5;
  f.activation.limit = 10.0F;  // also of the shared expert
  f.limit_field = "swiglu_limit";
  return f;
}

constexpr Family hy_v3() {
  Family f = biased_sigmoid("Hy3", {"hy_v3"});
  f.routing.renorm = RenormRule::kAlways;
  f.routing.reads_groups = false;
  f.routing.scale_field = "router_scaling_factor";
  f.routing.default_scale = 2.826;
  f.shared_count_field = "num_shared_experts";
  f.gate_weight = "router.gate.weight";
  f.gate_weight_alternative = "gate.weight";
  f.correction_bias = {"expert_bias", "e_score_correction_bias"};
  f.shared_layout =
      shared_mlp("shared_mlp.gate_proj", "shared_mlp.up_proj", "shared_mlp.down_proj");
  f.shared_alternative = kSharedExperts;
  f.assumed = {{"enable_moe_fp32_combine", ""}};  // in which type the two parts are added
  return f;
}

constexpr Family laguna() {
  Family f = biased_sigmoid("Laguna", {"laguna"});
  f.routing.renorm = RenormRule::kAlways;
  f.routing.reads_groups = false;
  f.routing.scale = ScaleRule::kOnOutput;
  f.routing.scale_field = "moe_routed_scaling_factor";
  f.shared = SharedRule::kOwnWidth;
  f.shared_count_field = "";
  f.correction_bias = {"experts.e_score_correction_bias", "gate.e_score_correction_bias"};
  f.shared_layout = kSharedExpert;
  f.shared_alternative = kSharedExperts;
  f.assumed = {{"moe_apply_router_weight_on_input", "false"},
               {"moe_router_logit_softcapping", "0"}};
  return f;
}

constexpr Family lfm2_moe() {
  Family f = without_shared(biased_sigmoid("LFM2-MoE", {"lfm2_moe"}));
  f.first_dense_field = "num_dense_layers";
  f.default_first_dense = 2;
  f.reads_hidden_act = false;
  f.routing.renorm_epsilon = 1e-6;
  f.routing.bias = BiasRule::kStated;
  f.routing.bias_field = "use_expert_bias";
  f.routing.reads_groups = false;
  f.correction_bias = {"expert_bias"};
  f.layouts = {w123("feed_forward"), fused_nt("feed_forward")};
  return f;
}

constexpr Family minimax_m3() {
  Family f = biased_sigmoid("MiniMax-M3", {"minimax_m3_vl_text"});
  f.width_fields = {"intermediate_size"};
  f.default_first_dense = 0;
  f.routing.renorm = RenormRule::kAlways;
  f.routing.reads_groups = false;
  f.routing.scale = ScaleRule::kOnOutput;
  f.routing.default_scale = 2.0;
  f.reads_hidden_act = false;
  f.activation = kGptOssActivation;
  f.limit_field = "swiglu_limit";
  f.alpha_field = "swiglu_alpha";
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "shared_intermediate_size";
  f.shared_alternative =
      granite_layout("", "shared_experts.gate_up_proj", "shared_experts.down_proj");
  f.correction_bias = {"e_score_correction_bias", "gate.e_score_correction_bias"};
  f.layouts = {w123("block_sparse_moe"), fused_nt("mlp")};
  f.assumed = {{"hidden_act", "\"silu\"|\"swigluoai\""}, {"use_routing_bias", "true"}};
  return f;
}

constexpr Family solar_open() {
  Family f = biased_sigmoid("Solar-Open", {"solar_open"});
  f.layer_rule = LayerRule::kEvery;
  return f;
}

// Sigmoid scores without a bias, and a shared expert without a gate.
constexpr Family flint() {
  Family f;
  f.title = "Flint";
  f.model_types = {"flint"};
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
  f.layouts = {fused_nt("block_sparse_moe")};
  return f;
}

// gpt-oss with gate and up side by side; its scale of 1 / top_k on the weights and top_k on the
// output cancel.
constexpr Family privacy_filter() {
  Family f;
  f.title = "OpenAI Privacy Filter";
  f.model_types = {"openai_privacy_filter"};
  f.width_fields = {"intermediate_size"};
  f.routing.method = RoutingMethod::kTopKSoftmax;
  f.reads_hidden_act = false;
  f.activation = kGptOssActivation;
  f.limit_field = "swiglu_limit";
  f.alpha_field = "swiglu_alpha";
  f.gate_weight = "router.weight";
  f.gate_bias = "router.bias";
  ExpertLayout layout = fused(ExpertStorage::kFusedNN, "mlp");
  layout.weight_suffixes = {""};
  layout.bias_suffix = "_bias";
  f.layouts = {layout};
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
  Family f = without_shared(biased_sigmoid("Inkling 2", {"inkling2_text"}));
  f.layer_rule = LayerRule::kEvery;
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
  f.assumed = {{"hidden_act", "\"silu\""}};
  return f;
}

}  // namespace moesaic::checkpoint
