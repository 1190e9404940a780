// Rows of the table of families: Mixtral, Qwen, gpt-oss and models made like them.
#pragma once

#include "checkpoint/config/families.h"
#include "checkpoint/config/family_layouts.h"

namespace moesaic::checkpoint {

constexpr Family mixtral() {
  Family f;
  f.title = "Mixtral";
  f.model_types = {"mixtral"};
  f.width_fields = {"intermediate_size"};
  f.routing.renorm = RenormRule::kAlways;
  f.layouts = {w123("block_sparse_moe"), fused_nt("mlp"), fused_nt("block_sparse_moe"),
               split_by_quantisers("block_sparse_moe"), split_by_quantisers("mlp")};
  return f;
}

constexpr Family qwen3_moe() {
  Family f;
  f.title = "Qwen3-MoE";
  f.model_types = {"qwen3_moe"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kSparseStep;
  f.routing.renorm = RenormRule::kStated;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  return f;
}

// The language model of Qwen3-VL-MoE: the same layers, fused, in the original files transposed.
constexpr Family qwen3_vl_moe() {
  Family f = qwen3_moe();
  f.title = "Qwen3-VL-MoE";
  f.model_types = {"qwen3_vl_moe_text"};
  f.routing.renorm = RenormRule::kAlways;
  f.layouts = {fused(ExpertStorage::kFusedNN, "mlp"), projections("mlp"), fused_nt("mlp")};
  return f;
}

constexpr Family qwen2_moe() {
  Family f = qwen3_moe();
  f.title = "Qwen2-MoE";
  f.model_types = {"qwen2_moe"};
  f.shared = SharedRule::kOwnWidth;
  f.shared_layout = kSharedExpert;
  f.shared_gate = "shared_expert_gate.weight";
  return f;
}

constexpr Family qwen3_next() {
  Family f = qwen2_moe();
  f.title = "Qwen3-Next";
  f.model_types = {"qwen3_next"};
  f.routing.default_renorm = true;
  return f;
}

// The language model of Qwen3.5-MoE.
constexpr Family qwen3_5_moe() {
  Family f = qwen3_next();
  f.title = "Qwen3.5-MoE";
  f.model_types = {"qwen3_5_moe_text"};
  f.routing.renorm = RenormRule::kAlways;
  f.layer_rule = LayerRule::kEvery;
  f.assumed = {{"decoder_sparse_step", "1"}, {"mlp_only_layers", "[]"}};
  return f;
}

constexpr Family olmoe() {
  Family f = qwen3_moe();
  f.title = "OLMoE";
  f.model_types = {"olmoe"};
  f.width_fields = {"intermediate_size"};
  f.layer_rule = LayerRule::kEvery;
  return f;
}

constexpr Family flex_olmo() {
  Family f = olmoe();
  f.title = "FlexOlmo";
  f.model_types = {"flex_olmo"};
  return f;
}

constexpr Family mellum() {
  Family f = qwen3_moe();
  f.title = "Mellum";
  f.model_types = {"mellum"};
  f.has_layer_types = true;
  f.layer_rule = LayerRule::kEvery;
  f.routing.default_renorm = true;
  return f;
}

constexpr Family minimax_m2() {
  Family f;
  f.title = "MiniMax-M2";
  f.model_types = {"minimax_m2"};
  f.width_fields = {"intermediate_size"};
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.renorm = RenormRule::kAlways;
  f.routing.bias = BiasRule::kStated;
  f.correction_bias = {"e_score_correction_bias", "gate.e_score_correction_bias"};
  f.layouts = {w123("block_sparse_moe"), fused_nt("mlp"), fused_nt("block_sparse_moe"),
               split_by_quantisers("block_sparse_moe"), split_by_quantisers("mlp")};
  f.assumed = {{"shared_moe_mode", ""}};  // how a shared expert, of which there is none, is added
  return f;
}

constexpr Family minimax_m1() {
  Family f = mixtral();
  f.title = "MiniMax-Text-01 and M1";
  f.model_types = {"minimax", "minimax_m1", "minimax_text_01"};
  f.assumed = {{"shared_moe_mode", ""}};
  return f;
}

constexpr Family phimoe() {
  Family f = mixtral();
  f.title = "Phi-3.5-MoE";
  f.model_types = {"phimoe"};
  f.gate_weight_alternative = "router.weight";
  f.routing.method = RoutingMethod::kSparseMixer;
  f.routing.renorm = RenormRule::kNever;
  return f;
}

constexpr Family granite() {
  Family f;
  f.title = "Granite-MoE";
  f.model_types = {"granitemoe"};
  f.width_fields = {"intermediate_size"};
  f.routing.method = RoutingMethod::kTopKSoftmax;
  f.gate_weight = "router.layer.weight";
  f.gate_weight_alternative = "router.weight";
  f.layouts = {granite_layout("block_sparse_moe", "input_linear", "output_linear"),
               fused_nt("block_sparse_moe"), split_by_quantisers("block_sparse_moe")};
  return f;
}

constexpr Family granite_shared() {
  Family f = granite();
  f.title = "Granite-MoE with a shared expert";
  f.model_types = {"granitemoeshared"};
  f.shared = SharedRule::kOwnWidth;
  f.shared_width_field = "shared_intermediate_size";
  f.shared_layout = granite_layout("", "shared_mlp.input_linear", "shared_mlp.output_linear");
  f.shared_beside_block = true;
  return f;
}

constexpr Family granite_hybrid() {
  Family f = granite_shared();
  f.title = "Granite 4";
  f.model_types = {"granitemoehybrid"};
  return f;
}

constexpr Family jamba() {
  Family f;
  f.title = "Jamba";
  f.model_types = {"jamba"};
  f.width_fields = {"intermediate_size"};
  f.layer_rule = LayerRule::kPeriod;
  f.gate_weight = "router.weight";
  f.layouts = {projections("feed_forward"), fused_nt("feed_forward")};
  return f;
}

constexpr Family gpt_oss() {
  Family f;
  f.title = "gpt-oss";
  f.model_types = {"gpt_oss"};
  f.width_fields = {"intermediate_size"};
  f.routing.method = RoutingMethod::kTopKSoftmax;
  // hidden_act says "silu" in these files; the activation is fixed by the family.
  f.reads_hidden_act = false;
  f.activation = kGptOssActivation;
  f.limit_field = "swiglu_limit";
  f.alpha_field = "swiglu_alpha";
  f.assumed = {{"hidden_act", "\"silu\""}};
  f.gate_weight = "router.weight";
  f.gate_bias = "router.bias";
  f.layouts = {gpt_oss_layout(), gpt_oss_mxfp4_layout(), gpt_oss_split_layout()};
  return f;
}

}  // namespace moesaic::checkpoint
