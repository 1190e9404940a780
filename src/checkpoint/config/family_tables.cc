// The table of families. Source: docs/spec/checkpoints.md section 3.
#include "checkpoint/config/families.h"
#include "checkpoint/config/family_layouts.h"
#include "checkpoint/config/family_rows_2026.h"
#include "checkpoint/config/family_rows_transformers.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::string_view kScoringReadings =
    "the models' own code stops, transformers computes with sigmoid or softmax as the family has "
    "it, vLLM computes what the field says";
constexpr std::string_view kMethodReadings =
    "the models' own code stops, transformers always selects with groups and a bias, vLLM follows "
    "the field";

constexpr Family mixtral() {
  Family f;
  f.title = "Mixtral";
  f.model_types = {"mixtral"};
  f.width_fields = {"intermediate_size"};
  f.routing.renorm = RenormRule::kAlways;
  f.layouts = {w123("block_sparse_moe"), fused_nt("mlp"), fused_nt("block_sparse_moe")};
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
  f.layer_rule = LayerRule::kEvery;
  f.routing.default_renorm = true;
  return f;
}

constexpr Family deepseek_v2() {
  Family f;
  f.title = "DeepSeek-V2";
  f.model_types = {"deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"};
  f.width_fields = {"moe_intermediate_size"};
  f.layer_rule = LayerRule::kFirstDense;
  f.routing.bias = BiasRule::kTopkMethod;
  f.routing.default_topk_method = "greedy";
  f.routing.reads_groups = true;
  f.routing.scale = ScaleRule::kAlways;
  f.shared = SharedRule::kCount;
  f.shared_count_field = "n_shared_experts";
  f.correction_bias = {"gate.e_score_correction_bias"};
  f.shared_layout = kSharedExperts;
  f.layouts = {projections("mlp"), fused_nt("mlp")};
  f.assumed = {
      {"norm_topk_prob", "false",
       "transformers scales the weights and never renormalises, the models' own code renormalises "
       "and then does not scale (but a single weight), vLLM renormalises and scales"},
      {"scoring_func", "\"softmax\"", kScoringReadings},
      {"n_group", ""},  // of topk_method "greedy"
      {"topk_group", ""},
  };
  return f;
}

constexpr Family deepseek_v3() {
  Family f = deepseek_v2();
  f.title = "DeepSeek-V3";
  f.model_types = {"deepseek_v3", "deepseek_v32"};
  f.default_first_dense = 3;
  f.routing.scoring_func = ScoringFunc::kSigmoid;
  f.routing.renorm = RenormRule::kStated;
  f.routing.default_renorm = true;
  f.routing.bias = BiasRule::kAlways;
  f.routing.default_topk_method = "";
  f.routing.default_n_group = 8;
  f.routing.default_topk_group = 4;
  f.routing.scale = ScaleRule::kAlways;
  f.routing.default_scale = 2.5;
  f.default_shared_count = 1;
  f.assumed = {
      {"scoring_func", "\"sigmoid\"", kScoringReadings},
      {"topk_method", "\"noaux_tc\"", kMethodReadings},
  };
  return f;
}

constexpr Family kimi_k2() {
  Family f = deepseek_v3();
  f.title = "Kimi-K2";
  f.model_types = {"kimi_k2"};
  f.default_first_dense = 1;
  f.routing.default_n_group = 1;
  f.routing.default_topk_group = 1;
  f.routing.default_scale = 2.827;
  return f;
}

constexpr Family glm4_moe() {
  Family f = kimi_k2();
  f.title = "GLM-4.5";
  f.model_types = {"glm4_moe", "glm4v_moe_text"};
  f.routing.default_scale = 1.0;
  f.assumed = {{"topk_method", "\"noaux_tc\""}};
  return f;
}

constexpr Family glm4_moe_lite() {
  Family f = glm4_moe();
  f.title = "GLM-4.7-Flash";
  f.model_types = {"glm4_moe_lite"};
  f.routing.default_scale = 1.8;
  return f;
}

constexpr Family glm_moe_dsa() {
  Family f = glm4_moe();
  f.title = "GLM-5";
  f.model_types = {"glm_moe_dsa"};
  f.default_first_dense = 3;
  f.routing.default_scale = 2.5;
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
  f.layouts = {w123("block_sparse_moe"), fused_nt("mlp"), fused_nt("block_sparse_moe")};
  f.assumed = {{"shared_moe_mode", ""}};  // how a shared expert, of which there is none, is added
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
  f.layouts = {gpt_oss_layout(), gpt_oss_mxfp4_layout()};
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

constexpr Family dots1() {
  Family f = glm4_moe();
  f.title = "dots.llm1";
  f.model_types = {"dots1"};
  f.default_first_dense = 0;
  f.default_shared_count = 0;
  f.routing.default_renorm = false;
  f.assumed.add({{"scoring_func", "\"sigmoid\"|\"noaux_tc\""}});
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
               fused_nt("block_sparse_moe")};
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
  f.assumed = {{"hidden_act", ""}, {"moe_latent_size", "null"}};
  return f;
}

constexpr auto kFamilies = std::to_array<Family>({
    mixtral(),        qwen2_moe(),      qwen3_moe(),     qwen3_next(),     deepseek_v2(),
    deepseek_v3(),    kimi_k2(),        glm4_moe(),      dots1(),          minimax_m1(),
    minimax_m2(),     olmoe(),          gpt_oss(),       llama4(),         phimoe(),
    granite(),        granite_shared(), jamba(),         dbrx(),           hunyuan(),
    hunyuan_large(),  ernie45(),        step3(),         longcat(),        nemotron_h(),
    qwen3_vl_moe(),   qwen3_5_moe(),    glm4_moe_lite(), glm_moe_dsa(),    granite_hybrid(),
    flex_olmo(),      mellum(),         afmoe(),         axk1(),           axk2(),
    bailing_hybrid(), beam(),           dots3(),         exaone_moe(),     glm5_next(),
    hy_v3(),          laguna(),         lfm2_moe(),      minimax_m3(),     solar_open(),
    flint(),          cohere2_moe(),    aria(),          granite_swa(),    privacy_filter(),
    qwen3_omni_moe(), qwen4_exp(),      inkling2(),      mistral_large4(), deepseek_v4(),
    mistral4(),       kimi_linear(),    mimo_v2_flash(), step3p5(),        gemma4(),
    hy_v4(),
});

}  // namespace

std::span<const Family> families() { return kFamilies; }

}  // namespace moesaic::checkpoint
