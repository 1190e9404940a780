// Rows of the table of families: models of 2026, complete in themselves. What each says is what the
// modelling code of transformers 5.23 computes. Source: that code, and the configurations of the
// released models.
#pragma once

#include "checkpoint/config/families.h"
#include "checkpoint/config/family_layouts.h"

namespace moesaic::checkpoint {

constexpr Family deepseek_v4() {
  Family f;
  f.title = "DeepSeek-V4";
  f.model_types = {"deepseek_v4"};
  f.width_fields = {"moe_intermediate_size"};
  f.default_hash_layers = 3;
  f.hash_table = "gate.tid2eid";
  f.activation.limit = 10.0F;  // also of the shared expert
  f.limit_field = "swiglu_limit";
  f.routing.scoring_func = ScoringFunc::kSqrtSoftplus;
  f.routing.scoring_field = "scoring_func";
  f.routing.may_be_softmax = false;
  f.routing.renorm = RenormRule::kAlways;
  f.routing.bias = BiasRule::kAlways;
  f.routing.scale = ScaleRule::kAlways;
  f.routing.default_scale = 1.5;
  f.shared = SharedRule::kCount;
  f.shared_count_field = "n_shared_experts";
  f.default_shared_count = 1;
  f.correction_bias = {"gate.bias", "gate.e_score_correction_bias"};
  f.shared_layout = shared_mlp("shared_experts.w1", "shared_experts.w3", "shared_experts.w2");
  f.shared_layout.scale_suffix = ".scale";
  f.shared_alternative = kSharedExperts;
  ExpertLayout released = w123("ffn");
  released.scale_suffix = ".scale";
  f.layouts = {released, fused_nt("mlp")};
  f.assumed = {
      {"n_shared_experts", "1"},      {"topk_method", "\"noaux_tc\""}, {"moe_layer_freq", "1"},
      {"first_k_dense_replace", "0"}, {"expert_dtype", "\"fp8\""},
  };
  return f;
}

constexpr Family mistral4() {
  Family f;
  f.title = "Mistral 4";
  f.model_types = {"mistral4"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kFirstDense;
  f.routing.renorm = RenormRule::kStated;
  f.routing.default_renorm = true;
  f.routing.reads_groups = true;
  f.routing.group_by_best_two = true;
  f.routing.scale = ScaleRule::kAlways;
  f.shared = SharedRule::kCount;
  f.shared_count_field = "n_shared_experts";
  f.default_shared_count = 1;
  f.shared_layout = kSharedExperts;
  f.layouts = {fused_nt("mlp"), projections("mlp")};
  f.assumed = {{"moe_layer_freq", "1"}};
  return f;
}

// Also the language model of Step-3.7.
constexpr Family step3p5() {
  Family f;
  f.title = "Step-3.5";
  f.model_types = {"step3p5"};
  f.has_layer_types = true;
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kEnumerated;
  f.default_first_dense = 3;
  f.has_layer_lists = true;
  f.reads_hidden_act = false;
  f.step_limits = "swiglu_limits";
  f.shared_step_limits = "swiglu_limits_shared";
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.renorm = RenormRule::kAlways;
  f.routing.bias = BiasRule::kAlways;
  f.routing.scale = ScaleRule::kOnOutput;
  f.routing.scale_field = "moe_router_scaling_factor";
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "share_expert_dim";
  f.shared_width_alias = "share_expert_dims";
  f.shared_layout =
      shared_mlp("share_expert.gate_proj", "share_expert.up_proj", "share_expert.down_proj");
  f.shared_alternative = shared_mlp("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj",
                                    "mlp.shared_experts.down_proj");
  f.shared_beside_block = true;
  f.correction_bias = {"router_bias", "gate.e_score_correction_bias"};
  ExpertLayout stacked = per_expert("moe", "gate_proj", "up_proj", "down_proj");
  stacked.storage = ExpertStorage::kStacked;
  f.layouts = {stacked, fused_nt("mlp")};
  f.assumed = {
      {"use_moe", "true"},
      {"moe_every_n_layer", "1"},
      {"moe_layer_offset", "0"},
      {"moe_dynamic_exp_p", "1"},
      {"moe_router_activation", "\"sigmoid\""},
      {"use_moe_router_bias", "true"},
      {"norm_expert_weight", "true"},
      {"hidden_act", "\"silu\""},
  };
  return f;
}

// The experts and their router lie beside the layer's dense MLP, not in a block of their own.
constexpr Family gemma4() {
  Family f;
  f.title = "Gemma 4";
  f.model_types = {"gemma4_text"};
  f.width_fields = {"moe_intermediate_size"};
  f.switch_field = "enable_moe_block";
  f.activation_field = "hidden_activation";
  f.activation.kind = ActivationKind::kGeluTanh;
  f.routing.renorm = RenormRule::kAlways;
  f.router_beside_block = true;
  f.gate_weight = "router.proj.weight";
  f.input_norm.eps_field = "rms_norm_eps";
  f.input_norm.default_eps = 1e-6;
  f.input_norm.router_scale = "router.scale";
  f.input_norm.experts_weight = "pre_feedforward_layernorm_2.weight";
  f.input_norm.expert_scale = "router.per_expert_scale";
  ExpertLayout layout = fused_nt("experts");
  layout.gate = "gate_up_proj";
  layout.down = "down_proj";
  ExpertLayout split = per_expert("experts", "{e}.gate_proj", "{e}.up_proj", "{e}.down_proj");
  split.of_quantisers = true;
  f.layouts = {layout, split};
  return f;
}

}  // namespace moesaic::checkpoint
