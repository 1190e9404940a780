// Rows of the table of families: models whose configurations and tensors have names of their own.
#pragma once

#include "checkpoint/config/families.h"
#include "checkpoint/config/family_layouts.h"

namespace moesaic::checkpoint {

constexpr Family dbrx() {
  Family f;
  f.title = "DBRX";
  f.model_types = {"dbrx"};
  f.width_fields = {"ffn_hidden_size"};
  f.hidden_field = "d_model";
  f.num_layers_field = "n_layers";
  f.moe_object = "ffn_config";
  f.activation_field = "ffn_act_fn";
  f.routing.method = RoutingMethod::kPNorm;
  f.layer_prefix = "transformer.blocks.";
  f.gate_weight = "router.layer.weight";
  ExpertLayout layout;
  layout.storage = ExpertStorage::kFlat;
  layout.block = "ffn";
  layout.gate = "experts.mlp.w1";
  layout.up = "experts.mlp.v1";
  layout.down = "experts.mlp.w2";
  layout.weight_suffixes = {""};
  f.layouts = {layout};
  f.assumed = {{"uniform_expert_assignment", "false"}};
  return f;
}

constexpr Family llama4() {
  Family f;
  f.title = "Llama 4";
  f.model_types = {"llama4_text"};
  f.width_fields = {"intermediate_size"};
  f.layer_rule = LayerRule::kInterleave;
  f.routing.method = RoutingMethod::kLlama4;
  f.routing.weight_on_input = true;
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "intermediate_size";
  f.shared_layout = kSharedExpert;
  f.gate_weight = "router.weight";
  // Quantised exports split the experts into linears.
  f.layouts = {fused(ExpertStorage::kFusedNN, "feed_forward"), projections("feed_forward")};
  return f;
}

constexpr Family hunyuan_large() {
  Family f;
  f.title = "Hunyuan-Large";
  f.model_types = {"hunyuan"};
  f.width_fields = {"moe_intermediate_size", "intermediate_size"};
  f.has_layer_lists = true;
  f.routing.renorm = RenormRule::kIfSeveral;
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "intermediate_size";
  f.shared_count_field = "num_shared_expert";
  f.default_shared_count = 1;
  f.shared_layout =
      shared_mlp("shared_mlp.gate_proj", "shared_mlp.up_proj", "shared_mlp.down_proj");
  f.shared_alternative = up_first("", "shared_mlp.gate_and_up_proj", "shared_mlp.down_proj");
  f.gate_weight = "gate.wg.weight";
  f.layouts = {projections("mlp"), fused_nt("mlp"),
               up_first("mlp", "experts.{e}.gate_and_up_proj", "experts.{e}.down_proj")};
  f.assumed = {
      {"use_mixed_mlp_moe", "true"},
      {"moe_drop_tokens", "false"},
      {"moe_random_routing_dropped_token", "false"},
      {"moe_layer_num_skipped", "0"},
      {"group_limited_greedy", "false"},
      {"n_group", "1|0|false"},
      {"topk_group", "1|0|false"},
      {"routed_scaling_factor", "1|false"},
  };
  return f;
}

constexpr Family hunyuan() {
  Family f = hunyuan_large();
  f.title = "Hunyuan-MoE";
  f.model_types = {"hunyuan_v1_moe"};
  f.routing.renorm = RenormRule::kOfSeveral;
  return f;
}

constexpr Family ernie45() {
  Family f;
  f.title = "ERNIE 4.5";
  f.model_types = {"ernie4_5_moe"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kInterval;
  f.routing.renorm = RenormRule::kAlways;
  f.routing.renorm_floor = 1e-12;
  f.routing.bias = BiasRule::kStated;
  f.routing.bias_field = "";
  f.correction_bias = {"moe_statics.e_score_correction_bias",
                       "gate.moe_statics.e_score_correction_bias"};
  f.shared = SharedRule::kCount;
  f.shared_count_field = "moe_num_shared_experts";
  f.shared_unsaid = "the models' own code then has no shared experts, transformers has two";
  f.shared_layout = kSharedExperts;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  f.assumed = {
      {"use_bias", "false"},
      {"moe_gate", "\"topk\"|\"topk_fused\""},
      {"moe_gate_act", "\"softmax\""},
      {"moe_norm_gate_logits", "true"},
      {"moe_use_hard_gate", "false"},
      {"moe_group_experts", "false"},
      {"moe_use_aux_free", ""},  // the tensors say whether there is a bias
      {"moe_capacity", ""},      // of training
      {"moe_reverse_token_drop", ""},
      {"moe_all_to_all_dropout", ""},
      {"moe_dense_experts_token_type_id", ""},
      {"moe_multimodal_dispatch_use_allgather", ""},
      {"moe_layer_feed_fake_token", ""},
      {"moe_with_send_router_loss", ""},
  };
  return f;
}

constexpr Family step3() {
  Family f;
  f.title = "Step-3";
  f.model_types = {"step3", "step3_text"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kEnumerated;
  f.default_first_dense = 1;
  f.routing.renorm = RenormRule::kStated;
  f.routing.renorm_field = "norm_expert_weight";
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "share_expert_dim";
  f.shared_layout =
      shared_mlp("share_expert.gate_proj", "share_expert.up_proj", "share_expert.down_proj");
  f.shared_beside_block = true;
  ExpertLayout layout = per_expert("moe", "gate_proj", "up_proj", "down_proj");
  layout.storage = ExpertStorage::kStacked;
  f.layouts = {layout};
  f.assumed = {
      {"use_moe", "true"},
      {"moe_every_n_layer", "1"},
      {"moe_layer_offset", "0"},
      {"moe_dynamic_exp_p", "1"},
      {"moe_router_activation", "\"softmax\""},
      {"moe_router_scaling_factor", "1"},
      {"use_moe_router_bias", "false"},
  };
  return f;
}

constexpr Family longcat() {
  Family f;
  f.title = "LongCat-Flash";
  f.model_types = {"longcat_flash"};
  f.width_fields = {"expert_ffn_hidden_size"};
  f.num_layers_field = "num_layers";
  f.routing.method = RoutingMethod::kZeroExpert;
  f.routing.bias = BiasRule::kAlways;
  f.routing.scale = ScaleRule::kAlways;
  f.routing.default_scale = 6.0;
  f.gate_weight = "router.classifier.weight";
  f.correction_bias = {"router.e_score_correction_bias"};
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  f.assumed = {
      {"norm_topk_prob", "false"}, {"router_bias", "false"}, {"scoring_func", "\"softmax\""}};
  return f;
}

constexpr Family nemotron_h() {
  Family f;
  f.title = "Nemotron-H";
  f.model_types = {"nemotron_h"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kPattern;
  f.activation_field = "mlp_hidden_act";
  f.activation.kind = ActivationKind::kRelu2NoMul;
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.renorm = RenormRule::kStated;
  f.routing.default_renorm = true;
  f.routing.bias = BiasRule::kAlways;
  f.routing.reads_groups = true;
  f.routing.scale = ScaleRule::kOnOutput;
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "moe_shared_expert_intermediate_size";
  f.shared_count_field = "n_shared_experts";
  f.default_shared_count = 1;
  f.shared_layout = shared_mlp("", "shared_experts.up_proj", "shared_experts.down_proj");
  f.layer_prefix = "backbone.layers.";
  f.correction_bias = {"gate.e_score_correction_bias"};
  ExpertLayout stacked = per_expert("mixer", "", "experts.up_proj", "experts.down_proj");
  stacked.storage = ExpertStorage::kStacked;
  stacked.weight_suffixes = {""};
  stacked.scale_suffix = "_scale_inv";
  f.layouts = {per_expert("mixer", "", "experts.{e}.up_proj", "experts.{e}.down_proj"), stacked};
  f.assumed = {{"hidden_act", ""},
               {"moe_latent_size", "null"},
               {"n_shared_experts", "1",
                "transformers has one shared expert of the width that is stated, SGLang one that "
                "is this many times as wide"}};
  return f;
}

}  // namespace moesaic::checkpoint
