// Rows of the table of families: models that select by biased sigmoid scores, as DeepSeek-V3 does, and
// say so in fields of transformers' names. What each says is what its modelling code computes.
#pragma once

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
  f.has_layer_types = true;
  f.shared_layout = kSharedExperts;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  f.assumed = {{"topk_method", "\"noaux_tc\""}};  // another name of all this
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
  f.has_layer_types = false;
  f.first_dense_fields = {"num_dense_layers"};
  f.routing.renorm = RenormRule::kAlways;
  f.routing.reads_groups = false;
  f.routing.scale_field = "route_scale";
  f.shared_count_field = "num_shared_experts";
  f.default_shared_count = 2;
  f.gate_weight = "router.gate.weight";
  f.correction_bias = {"expert_bias"};
  f.assumed.add({{"score_func", "\"sigmoid\""},
                 {"route_norm", "true"},
                 {"num_expert_groups", "1"},
                 {"num_limited_groups", "1"}});
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
  f.routing.renorm_alias = "norm_topk_prob";
  f.routing.group_fields = {"num_expert_group", "n_group"};
  f.routing.default_n_group = 8;
  f.routing.default_topk_group = 4;
  f.routing.default_scale = 2.5;
  f.shared_count_field = "num_shared_experts";
  f.shared_count_alias = "n_shared_experts";
  f.shared_repeated_width = "moe_shared_expert_intermediate_size";
  f.correction_bias = {"gate.expert_bias", "gate.e_score_correction_bias"};
  f.assumed.add({{"score_function", "\"sigmoid\""},
                 {"moe_router_enable_expert_bias", "true"},
                 {"moe_router_enable_routed_scaling", "true"},
                 {"moe_router_enable_shared_expert", "true"}});
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
  f.has_frequency_list = true;
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "shared_experts_intermediate_size";
  f.shared_width_alias = "moe_shared_expert_intermediate_size";
  f.default_shared_width = 1536;
  return f;
}

constexpr Family exaone_moe() {
  Family f = biased_sigmoid("EXAONE-MoE", {"exaone_moe"});
  // Its first files have the names of the model's own code.
  f.first_dense_fields = {"first_k_dense_replace", "first_last_k_dense_replace"};
  f.moe_flags_field = "is_moe_layer";
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
  f.width_alias = "expert_hidden_dim";
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
  f.assumed.add({{"enable_moe_fp32_combine", ""},  // in which type the two parts are added
                 {"route_norm", "true"},
                 {"moe_router_use_sigmoid", "true"},
                 {"moe_router_enable_expert_bias", "true"}});
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
  f.assumed.add({{"moe_apply_router_weight_on_input", "false"},
                 {"moe_router_logit_softcapping", "0"},
                 {"moe_router_use_sigmoid", "true"},
                 {"moe_router_score_func", "\"sigmoid\""}});
  return f;
}

constexpr Family lfm2_moe() {
  Family f = without_shared(biased_sigmoid("LFM2-MoE", {"lfm2_moe"}));
  f.has_layer_types = false;
  f.first_dense_fields = {"num_dense_layers"};
  f.default_first_dense = 2;
  f.reads_hidden_act = false;
  f.routing.renorm_epsilon = 1e-6;
  f.routing.bias = BiasRule::kStated;
  f.routing.bias_field = "use_expert_bias";
  f.routing.reads_groups = false;
  f.correction_bias = {"expert_bias"};
  f.layouts = {w123("feed_forward"), fused_nt("feed_forward"), split_by_quantisers("feed_forward")};
  return f;
}

constexpr Family minimax_m3() {
  Family f = biased_sigmoid("MiniMax-M3", {"minimax_m3_vl_text"});
  f.width_fields = {"intermediate_size"};
  f.layer_rule = LayerRule::kListed;
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
  f.assumed.add({{"hidden_act", "\"silu\"|\"swigluoai\""},
                 {"use_routing_bias", "true"},
                 {"swiglu_beta", "1"},
                 {"n_shared_experts", "1",
                  "transformers has one shared expert of the width that is stated, SGLang one that "
                  "is this many times as wide as a routed one"}});
  return f;
}

constexpr Family solar_open() {
  Family f = biased_sigmoid("Solar-Open", {"solar_open"});
  f.layer_rule = LayerRule::kEvery;
  f.has_layer_types = false;
  f.assumed.add({{"moe_layer_freq", "1"}});
  return f;
}

constexpr Family kimi_linear() {
  Family f = biased_sigmoid("Kimi-Linear", {"kimi_linear"});
  f.routing.renorm_field = "moe_renormalize";
  f.routing.renorm_alias = "norm_topk_prob";
  f.routing.group_fields = {"num_expert_group", "n_group"};
  f.routing.default_scale = 2.446;
  f.routing.scale_unsaid = "the model's own code scales by 1, transformers by 2.446";
  f.first_dense_unsaid =
      "by the model's own code all layers have experts, by transformers all but the first";
  f.shared_count_field = "num_shared_experts";
  f.shared_count_alias = "n_shared_experts";
  f.shared_unsaid = "the model's own code then has no shared expert, transformers has one";
  f.layouts = {w123("block_sparse_moe"), fused_nt("mlp"), split_by_quantisers("block_sparse_moe")};
  f.assumed.add({{"moe_router_activation_func", "\"sigmoid\""},
                 {"use_grouped_topk", "true"},
                 {"moe_layer_freq", "1"}});
  return f;
}

constexpr Family mimo_v2_flash() {
  Family f = without_shared(biased_sigmoid("MiMo-V2-Flash", {"mimo_v2_flash"}));
  f.layer_rule = LayerRule::kListed;
  return f;
}

constexpr Family hy_v4() {
  Family f = biased_sigmoid("Hy4", {"hy_v4", "hy_v4_vl_text"});
  f.reads_hidden_act = false;
  f.activation.limit = 10.0F;
  f.limit_field = "swiglu_limit";
  f.shared_unlimited = true;
  f.routing.default_scale = 2.827;
  // transformers gives the attention's gate another name in files, and the shared expert's with it.
  f.shared_alternative = shared_mlp("shared_experts.linear_gate", "shared_experts.up_proj",
                                    "shared_experts.down_proj");
  f.layouts = {fused_nt("mlp"), projections("mlp")};
  f.assumed.add(
      {{"hidden_act", "\"silu\""}, {"moe_layer_freq", "1"}, {"first_k_dense_replace", "1"}});
  return f;
}

// The blocks of DeepSeek-V3 (105B) and GLM-4.5 (30B), which are the same one.
constexpr Family sarvam() {
  Family f = biased_sigmoid("Sarvam", {"sarvam_moe", "sarvam_mla"});
  f.has_layer_types = false;
  f.routing.default_scale = 2.5;
  f.shared_count_alias = "num_shared_experts";
  f.shared_repeated_width = "moe_shared_expert_intermediate_size";
  f.correction_bias = {"gate.expert_bias", "gate.e_score_correction_bias"};
  f.assumed.add({{"score_function", "\"sigmoid\""}, {"moe_router_enable_expert_bias", "true"}});
  return f;
}

}  // namespace moesaic::checkpoint
