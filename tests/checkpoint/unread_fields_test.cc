// What a configuration states and the engine does not read: assumed values, unknown fields, and the
// published configurations that must not be refused for a harmless one.
#include "checkpoint/config/unread_fields.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/config/config.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

using Json = nlohmann::json;

Json stating(Json base, const Json& changes) {
  base.update(changes);
  return base;
}

// Enough for any family to have MoE layers.
Json plain_config(const std::string& model_type, const Json& more = Json::object()) {
  Json json = {{"model_type", model_type},   {"hidden_size", 16},      {"intermediate_size", 8},
               {"moe_intermediate_size", 8}, {"num_hidden_layers", 4}, {"num_experts_per_tok", 2},
               {"first_k_dense_replace", 0}};
  if (model_type == "dbrx") {
    json = {{"model_type", "dbrx"},
            {"d_model", 16},
            {"n_layers", 2},
            {"ffn_config", {{"ffn_hidden_size", 8}, {"moe_num_experts", 8}, {"moe_top_k", 2}}}};
    json["ffn_config"].update(more);
    return json;
  }
  if (model_type == "longcat_flash") {
    json["expert_ffn_hidden_size"] = 8;
    json["num_layers"] = 2;
  }
  if (model_type == "step3") json["share_expert_dim"] = 8;
  if (model_type == "nemotron_h") {
    json["moe_shared_expert_intermediate_size"] = 8;
    json["hybrid_override_pattern"] = "ME*E";
  }
  if (model_type.starts_with("qwen2") || model_type.starts_with("qwen3_5")) {
    json["shared_expert_intermediate_size"] = 8;
  }
  if (model_type == "deepseek_v2") json["n_shared_experts"] = 2;
  if (model_type == "ernie4_5_moe") json["moe_num_shared_experts"] = 2;
  json["num_local_experts"] = 16;
  return stating(json, more);
}

Status status_of(const Json& json) { return checkpoint::parse_model_config(json.dump()).status(); }

MoeLayerSpec spec_of(const Json& json) {
  const Result<checkpoint::ModelConfig> config = checkpoint::parse_model_config(json.dump());
  EXPECT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_TRUE(!config.ok() || !config->layers.empty());
  return config.ok() && !config->layers.empty() ? config->layers[0] : MoeLayerSpec{};
}

TEST(StatedConstants, GptOssActivation) {
  const ActivationSpec unsaid = spec_of(plain_config("gpt_oss")).activation;
  EXPECT_EQ(unsaid, (ActivationSpec{ActivationKind::kSwigluOai, 7.0F, 1.702F, 1.0F, 0.0F}));
  const ActivationSpec stated =
      spec_of(plain_config("gpt_oss", {{"swiglu_alpha", 1.0}, {"swiglu_limit", 5.5}})).activation;
  EXPECT_EQ(stated, (ActivationSpec{ActivationKind::kSwigluOai, 5.5F, 1.0F, 1.0F, 0.0F}));
  EXPECT_EQ(mismatch(status_of(plain_config("gpt_oss", {{"swiglu_alpha", "1.0"}})),
                     StatusCode::kCorruptFile, {"swiglu_alpha", "a number"}),
            "");
  EXPECT_EQ(mismatch(status_of(plain_config("gpt_oss", {{"swiglu_limit", 0}})),
                     StatusCode::kInvalidArgument, {"swiglu_limit", "got 0", "> 0"}),
            "");
}

TEST(StatedConstants, DbrxDividesByTheSumUnlessNullSaysOtherwise) {
  const RoutingSpec unsaid = spec_of(plain_config("dbrx")).routing;
  EXPECT_EQ(unsaid.method, RoutingMethod::kPNorm);
  EXPECT_EQ(unsaid.p_norm, 1.0);
  const Json none = {{"moe_normalize_expert_weights", nullptr}};
  EXPECT_EQ(spec_of(plain_config("dbrx", none)).routing.method, RoutingMethod::kTopK);
  const Json extra = {{"ffn_act_fn", {{"name", "gelu"}, {"approximate", "tanh"}}}};
  EXPECT_EQ(mismatch(status_of(plain_config("dbrx", extra)), StatusCode::kUnsupported,
                     {"ffn_act_fn", "approximate", "tanh"}),
            "");
}

struct Refusal {
  const char* model_type;
  Json fields;
  StatusCode code;
  std::vector<std::string> words;
};

TEST(AssumedFields, OtherValuesAreRefusedByName) {
  constexpr StatusCode kNo = StatusCode::kUnsupported;
  constexpr StatusCode kTwo = StatusCode::kAmbiguousFormat;
  const std::vector<Refusal> refusals = {
      {"mixtral", {{"norm_topk_prob", false}}, kNo, {"norm_topk_prob", "got false", "need true"}},
      {"mixtral", {{"routed_scaling_factor", 2.5}}, kNo, {"got 2.5", "need 1", "Mixtral"}},
      {"mixtral", {{"scoring_func", "sigmoid"}}, kNo, {"scoring_func", "\"sigmoid\"", "softmax"}},
      {"jamba", {{"norm_topk_prob", true}}, kNo, {"norm_topk_prob", "got true", "need false"}},
      {"qwen3_vl_moe_text", {{"norm_topk_prob", false}}, kNo, {"norm_topk_prob"}},
      {"qwen3_5_moe_text", {{"norm_topk_prob", false}}, kNo, {"norm_topk_prob"}},
      {"qwen3_5_moe_text", {{"mlp_only_layers", {1}}}, kNo, {"mlp_only_layers", "a list of 1"}},
      {"qwen3_moe", {{"shared_expert_intermediate_size", 8}}, kNo, {"got 8", "need 0"}},
      {"gpt_oss", {{"hidden_act", "gelu"}}, kNo, {"hidden_act", "\"gelu\"", "\"silu\""}},
      {"minimax_m2", {{"scoring_func", "softmax"}}, kNo, {"scoring_func", "\"sigmoid\""}},
      {"minimax_m2", {{"shared_intermediate_size", 64}}, kNo, {"shared_intermediate_size", "64"}},
      {"glm4_moe", {{"topk_method", "greedy"}}, kNo, {"topk_method", "\"noaux_tc\""}},
      {"deepseek_v2", {{"mlp_bias", true}}, kNo, {"mlp_bias", "got true", "need false"}},
      {"deepseek_v2",
       {{"norm_topk_prob", true}},
       kTwo,
       {"norm_topk_prob", "got true", "never renormalises", "does not scale",
        "renormalises and scales"}},
      {"deepseek_v2", {{"scoring_func", "sigmoid"}}, kTwo, {"scoring_func", "transformers"}},
      {"deepseek_v3", {{"scoring_func", "softmax"}}, kTwo, {"scoring_func", "vLLM"}},
      {"deepseek_v3", {{"topk_method", "greedy"}}, kTwo, {"topk_method", "vLLM"}},
      {"deepseek_v3", {{"n_group", nullptr}}, kTwo, {"n_group", "null"}},
      {"hunyuan_v1_moe", {{"num_experts_per_tok", 1}}, kTwo, {"moe_topk", "got 1"}},
      {"hunyuan_v1_moe", {{"moe_layer_num_skipped", 1}}, kNo, {"moe_layer_num_skipped", "got 1"}},
      {"dbrx", {{"uniform_expert_assignment", true}}, kNo, {"ffn_config", "uniform_expert"}},
      {"ernie4_5_moe", {{"use_bias", true}}, kNo, {"use_bias", "got true", "need false"}},
      {"ernie4_5_moe", {{"moe_gate_act", "sigmoid"}}, kNo, {"moe_gate_act", "softmax"}},
      {"step3", {{"use_moe_router_bias", true}}, kNo, {"use_moe_router_bias"}},
      {"longcat_flash", {{"router_bias", true}}, kNo, {"router_bias", "need false"}},
      {"nemotron_h", {{"moe_latent_size", 8}}, kNo, {"moe_latent_size", "got 8", "need null"}},
      {"nemotron_h", {{"n_shared_experts", 2}}, kTwo, {"n_shared_experts", "got 2", "SGLang"}},
      {"nemotron_h", {{"n_shared_experts", 0}}, kTwo, {"n_shared_experts", "got 0", "need 1"}},
      {"gpt_oss", {{"swiglu_limit", nullptr}}, kTwo, {"swiglu_limit", "null", "default of 7"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(std::string(refusal.model_type) + refusal.fields.dump());
    EXPECT_EQ(mismatch(status_of(plain_config(refusal.model_type, refusal.fields)), refusal.code,
                       refusal.words),
              "");
  }
  // The assumed value itself, and null, are fine.
  for (const Json& fields :
       {Json{{"norm_topk_prob", true}, {"routed_scaling_factor", 1}, {"scoring_func", "softmax"}},
        Json{{"norm_topk_prob", nullptr}, {"mlp_bias", false}, {"n_shared_experts", 0}}}) {
    EXPECT_TRUE(status_of(plain_config("mixtral", fields)).ok()) << fields;
  }
}

TEST(UnknownFields, ThatSpeakOfExpertsAreRefused) {
  for (const char* name : {"moe_temperature", "router_scale", "expert_dropout", "swiglu_limit",
                           "swiglu_alpha", "topk_norm_eps", "routing_method", "MoE_renormalize",
                           "scoring_function", "score_function", "score_func"}) {
    EXPECT_EQ(mismatch(status_of(plain_config("qwen3_moe", {{name, 0.5}})),
                       StatusCode::kUnsupported, {name, "got 0.5", "Qwen3-MoE", "null"}),
              "");
    EXPECT_TRUE(status_of(plain_config("qwen3_moe", {{name, nullptr}})).ok()) << name;
  }
  EXPECT_EQ(mismatch(status_of(plain_config("dbrx", {{"moe_foo", 1}})), StatusCode::kUnsupported,
                     {"ffn_config", "moe_foo"}),
            "");
  EXPECT_EQ(mismatch(status_of(plain_config("gpt_oss", {{"swiglu_limits", {7, 7}}})),
                     StatusCode::kUnsupported, {"swiglu_limits", "a list of 2"}),
            "");
  for (const char* name : {"rope_theta", "sliding_window", "index_topk", "mamba_expand",
                           "router_aux_loss_coef", "top_k", "num_key_value_heads", "n_groups"}) {
    EXPECT_TRUE(status_of(plain_config("qwen3_moe", {{name, 3}})).ok()) << name;
  }
  // In a nested language model, the wrapper's own fields are not about its layers.
  EXPECT_TRUE(status_of({{"model_type", "vl"},
                         {"moe_of_the_vision_tower", 3},
                         {"text_config", plain_config("qwen3_moe")}})
                  .ok());
}

// The fields besides the sizes that published files and the configuration classes of transformers
// have.
TEST(UnknownFields, PublishedConfigurationsAreAccepted) {
  const std::vector<std::pair<const char*, Json>> published = {
      {"mixtral",
       {{"router_aux_loss_coef", 0.02},
        {"output_router_logits", false},
        {"router_jitter_noise", 0.0},
        {"sliding_window", nullptr}}},
      {"qwen2_moe",
       {{"decoder_sparse_step", 1},
        {"norm_topk_prob", false},
        {"mlp_only_layers", Json::array()},
        {"shared_expert_intermediate_size", 8},
        {"router_aux_loss_coef", 0.001},
        {"output_router_logits", false},
        {"qkv_bias", true}}},
      {"qwen3_moe",
       {{"decoder_sparse_step", 1},
        {"norm_topk_prob", true},
        {"mlp_only_layers", Json::array()},
        {"router_aux_loss_coef", 0.001},
        {"max_window_layers", 48}}},
      {"qwen3_5_moe_text",
       {{"mlp_only_layers", Json::array()},
        {"router_aux_loss_coef", 0.001},
        {"full_attention_interval", 4},
        {"mtp_num_hidden_layers", 1},
        {"attn_output_gate", true}}},
      {"deepseek_v2",
       {{"aux_loss_alpha", 0.001},
        {"ep_size", 1},
        {"moe_layer_freq", 1},
        {"n_group", 1},
        {"topk_group", 1},
        {"norm_topk_prob", false},
        {"scoring_func", "softmax"},
        {"seq_aux", true},
        {"topk_method", "greedy"},
        {"routed_scaling_factor", 1.0}}},
      {"deepseek_v3",
       {{"aux_loss_alpha", 0.001},
        {"ep_size", 1},
        {"moe_layer_freq", 1},
        {"n_group", 4},
        {"topk_group", 2},
        {"norm_topk_prob", true},
        {"scoring_func", "sigmoid"},
        {"seq_aux", true},
        {"topk_method", "noaux_tc"},
        {"routed_scaling_factor", 2.5},
        {"num_nextn_predict_layers", 1},
        {"index_topk", 2048},
        {"index_n_heads", 64}}},
      {"kimi_k2",
       {{"aux_loss_alpha", 0.001},
        {"ep_size", 1},
        {"moe_layer_freq", 1},
        {"n_group", 1},
        {"topk_group", 1},
        {"norm_topk_prob", true},
        {"scoring_func", "sigmoid"},
        {"seq_aux", true},
        {"topk_method", "noaux_tc"},
        {"routed_scaling_factor", 2.827}}},
      {"glm4_moe",
       {{"n_group", 1},
        {"topk_group", 1},
        {"norm_topk_prob", true},
        {"n_shared_experts", 1},
        {"routed_scaling_factor", 2.5},
        {"use_qk_norm", true},
        {"num_nextn_predict_layers", 1}}},
      {"glm4_moe_lite",
       {{"topk_method", "noaux_tc"},
        {"n_group", 1},
        {"topk_group", 1},
        {"norm_topk_prob", true},
        {"routed_scaling_factor", 1.8},
        {"num_nextn_predict_layers", 1}}},
      {"glm_moe_dsa",
       {{"topk_method", "noaux_tc"},
        {"scoring_func", "sigmoid"},
        {"moe_layer_freq", 1},
        {"ep_size", 1},
        {"index_topk", 2048},
        {"n_group", 1},
        {"topk_group", 1},
        {"mlp_layer_types", {"dense", "dense", "dense", "sparse"}},
        {"mlp_bias", false}}},
      {"dots1",
       {{"n_shared_experts", 2},
        {"norm_topk_prob", true},
        {"scoring_func", "noaux_tc"},
        {"routed_scaling_factor", 2.5},
        {"moe_layer_freq", 1},
        {"topk_method", "noaux_tc"}}},
      {"minimax_m1",
       {{"router_aux_loss_coef", 0.001},
        {"router_jitter_noise", 0.0},
        {"shared_intermediate_size", 0},
        {"shared_moe_mode", "sigmoid"},
        {"layernorm_mlp_alpha", 3.5},
        {"postnorm", true}}},
      {"minimax_m2",
       {{"scoring_func", "sigmoid"},
        {"use_routing_bias", true},
        {"shared_intermediate_size", 0},
        {"shared_moe_mode", "sigmoid"},
        {"router_jitter_noise", 0.0},
        {"num_mtp_modules", 3},
        {"router_aux_loss_coef", 0.001},
        {"use_qk_norm", true}}},
      {"gpt_oss",
       {{"experts_per_token", 2},
        {"hidden_act", "silu"},
        {"swiglu_limit", 7.0},
        {"router_aux_loss_coef", 0.9},
        {"output_router_logits", false}}},
      {"llama4_text",
       {{"num_experts_per_tok", 1},
        {"interleave_moe_layer_step", 1},
        {"moe_layers", {0, 1, 2}},
        {"router_aux_loss_coef", 0.001},
        {"router_jitter_noise", 0.0},
        {"intermediate_size_mlp", 16},
        {"for_llm_compressor", false}}},
      {"phimoe",
       {{"input_jitter_noise", 0.01},
        {"router_jitter_noise", 0.01},
        {"router_aux_loss_coef", 0.0},
        {"lm_head_bias", true}}},
      {"granitemoehybrid",
       {{"shared_intermediate_size", 8},
        {"router_aux_loss_coef", 0.01},
        {"mamba_expand", 2},
        {"residual_multiplier", 0.22},
        {"mamba_n_groups", 1}}},
      {"jamba",
       {{"expert_layer_offset", 1},
        {"expert_layer_period", 2},
        {"router_aux_loss_coef", 0.001},
        {"mamba_expand", 2}}},
      {"dbrx",
       {{"moe_jitter_eps", 0.01},
        {"moe_loss_weight", 0.05},
        {"uniform_expert_assignment", false},
        {"ffn_act_fn", {{"name", "silu"}}},
        {"top_k", 50},
        {"top_p", 1.0}}},
      {"hunyuan_v1_moe",
       {{"moe_topk", {2, 2, 2, 2}},
        {"num_experts_per_tok", nullptr},
        {"num_shared_expert", {1, 1, 1, 1}},
        {"use_mixed_mlp_moe", true},
        {"moe_drop_tokens", false},
        {"moe_layer_num_skipped", 0},
        {"norm_topk_prob", true},
        {"moe_random_routing_dropped_token", false},
        {"group_limited_greedy", false},
        {"routed_scaling_factor", false},
        {"n_group", false},
        {"topk_group", false}}},
      {"ernie4_5_moe",
       {{"moe_capacity", {64, 64, 64}},
        {"moe_gate", "topk"},
        {"moe_use_aux_free", true},
        {"moe_num_shared_experts", 2},
        {"moe_layer_interval", 1},
        {"use_bias", false},
        {"moe_layer_start_index", 1},
        {"moe_layer_end_index", 3},
        {"moe_norm_min", 1e-12}}},
      {"step3",
       {{"moe_layers_enum", "1,2,3"},
        {"norm_expert_weight", false},
        {"share_q_dim", 2048},
        {"num_attention_groups", 1}}},
      {"longcat_flash",
       {{"zero_expert_num", 4},
        {"zero_expert_type", "identity"},
        {"router_bias", false},
        {"routed_scaling_factor", 6.0},
        {"mla_scale_q_lora", true},
        {"norm_topk_prob", false}}},
      {"nemotron_h",
       {{"mlp_hidden_act", "relu2"},
        {"moe_latent_size", nullptr},
        {"n_groups", 8},
        {"moe_shared_expert_overlap", true},
        {"mlp_bias", false},
        {"mamba_hidden_act", "silu"},
        {"n_group", 1},
        {"topk_group", 1},
        {"norm_topk_prob", true},
        {"n_shared_experts", 1}}},
      {"olmoe", {{"norm_topk_prob", false}, {"router_aux_loss_coef", 0.01}, {"clip_qkv", nullptr}}},
      {"flex_olmo", {{"norm_topk_prob", false}, {"router_aux_loss_coef", 0.01}}},
      {"mellum", {{"mlp_layer_types", {"sparse", "sparse", "dense", "sparse"}}}},
  };
  for (const auto& [type, fields] : published) {
    EXPECT_TRUE(status_of(plain_config(type, fields)).ok())
        << type << ": " << status_of(plain_config(type, fields)).to_string();
  }
}

// Two facts that look alike in the files of one family.
TEST(StatedConstants, GraniteHybridMayBeDense) {
  const Json json = {{"num_local_experts", 0}, {"shared_intermediate_size", 8}};
  const Result<checkpoint::ModelConfig> dense =
      checkpoint::parse_model_config(plain_config("granitemoehybrid", json).dump());
  ASSERT_TRUE(dense.ok()) << dense.status().to_string();
  EXPECT_TRUE(dense->layers.empty());
}

}  // namespace
}  // namespace moesaic::test
