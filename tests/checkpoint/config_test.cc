// parse_model_config: which layers are MoE, defaults, aliases, caps; skip lists; the family tables.
#include "checkpoint/config/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/binding/layer_plan.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

using Json = nlohmann::json;

Json qwen3() {
  return {{"model_type", "qwen3_moe"}, {"hidden_size", 64},       {"moe_intermediate_size", 32},
          {"num_hidden_layers", 6},    {"num_experts", 8},        {"num_experts_per_tok", 2},
          {"dtype", "bfloat16"},       {"intermediate_size", 128}};
}

Json deepseek_v3() {
  return {{"model_type", "deepseek_v3"},   {"hidden_size", 7168},
          {"moe_intermediate_size", 2048}, {"num_hidden_layers", 61},
          {"n_routed_experts", 256},       {"num_experts_per_tok", 8},
          {"torch_dtype", "bfloat16"},     {"intermediate_size", 18432}};
}

checkpoint::ModelConfig parse(const Json& json) {
  Result<checkpoint::ModelConfig> config = checkpoint::parse_model_config(json.dump());
  EXPECT_TRUE(config.ok()) << config.status().to_string();
  return config.ok() ? *config : checkpoint::ModelConfig{};
}

// The first MoE layer; a default one (and a failed test) when there is none.
MoeLayerSpec first_layer(const Json& json) {
  const checkpoint::ModelConfig config = parse(json);
  EXPECT_FALSE(config.layers.empty());
  return config.layers.empty() ? MoeLayerSpec{} : config.layers[0];
}

std::vector<int> layers_of(const Json& json) {
  std::vector<int> layers;
  for (const MoeLayerSpec& spec : parse(json).layers) layers.push_back(spec.layer);
  return layers;
}

Json with(Json base, const Json& changes) {
  base.update(changes);
  return base;
}

Json without(Json base, std::initializer_list<const char*> keys) {
  for (const char* key : keys) base.erase(key);
  return base;
}

TEST(ConfigLayers, SparseStepAndDenseList) {
  const Json step = with(qwen3(), {{"decoder_sparse_step", 2}});
  EXPECT_EQ(layers_of(step), (std::vector<int>{1, 3, 5}));
  EXPECT_EQ(layers_of(with(step, {{"mlp_only_layers", {3}}})), (std::vector<int>{1, 5}));
  EXPECT_EQ(layers_of(qwen3()), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(layers_of(with(qwen3(), {{"decoder_sparse_step", 7}})), std::vector<int>{});
}

TEST(ConfigLayers, FirstDenseAndFrequency) {
  // DeepSeek-V3: first_k_dense_replace 3 is also the default; the layer behind the last one holds
  // the multi-token prediction and is not a layer of the model.
  for (const Json& extra :
       {Json::object(), Json{{"first_k_dense_replace", 3}, {"num_nextn_predict_layers", 1}}}) {
    const std::vector<int> layers = layers_of(with(deepseek_v3(), extra));
    ASSERT_EQ(layers.size(), 58U);
    EXPECT_EQ(layers.front(), 3);
    EXPECT_EQ(layers.back(), 60);
  }
  EXPECT_EQ(layers_of(with(deepseek_v3(), {{"num_hidden_layers", 8}, {"moe_layer_freq", 2}})),
            (std::vector<int>{4, 6}));
  EXPECT_EQ(layers_of(with(deepseek_v3(), {{"first_k_dense_replace", 100}})), std::vector<int>{});
}

TEST(ConfigLayers, DenseMembersHaveNone) {
  EXPECT_EQ(layers_of(with(deepseek_v3(), {{"n_routed_experts", nullptr}})), std::vector<int>{});
  EXPECT_EQ(layers_of(with(qwen3(), {{"num_experts", 0}})), std::vector<int>{});
  const auto absent = checkpoint::parse_model_config(without(qwen3(), {"num_experts"}).dump());
  EXPECT_EQ(mismatch(absent.status(), StatusCode::kCorruptFile, {"num_experts", "missing"}), "");
}

TEST(ConfigDefaults, FollowTheFamily) {
  const MoeLayerSpec v3 = first_layer(deepseek_v3());
  EXPECT_EQ(v3.routing.num_expert_group, 8);
  EXPECT_EQ(v3.routing.topk_group, 4);
  EXPECT_EQ(v3.routing.method, RoutingMethod::kGroupedTopK);
  EXPECT_EQ(v3.routing.routed_scaling_factor, 2.5);
  EXPECT_TRUE(v3.routing.renormalize && v3.routing.has_correction_bias);
  EXPECT_EQ(v3.routing.scoring_func, ScoringFunc::kSigmoid);
  EXPECT_EQ(v3.shared.intermediate_size, 2048);
  const MoeLayerSpec k2 =
      first_layer(with(deepseek_v3(), {{"model_type", "kimi_k2"}, {"n_routed_experts", 384}}));
  EXPECT_EQ(k2.layer, 1);
  EXPECT_EQ(k2.routing.num_expert_group, 1);
  EXPECT_EQ(k2.routing.routed_scaling_factor, 2.827);
  const MoeLayerSpec q3 = first_layer(qwen3());
  EXPECT_FALSE(q3.routing.renormalize);
  EXPECT_EQ(q3.intermediate_size, 32) << "intermediate_size is the dense width";
  Json oss = with(without(qwen3(), {"moe_intermediate_size"}), {{"model_type", "gpt_oss"}});
  EXPECT_EQ(first_layer(oss).intermediate_size, 128) << "here it is the expert width";
  EXPECT_EQ(first_layer(oss).activation.limit, 7.0F);
  EXPECT_EQ(first_layer(without(qwen3(), {"dtype"})).activation_dtype, DType::kBF16);
}

TEST(ConfigFieldsOf, ScoringTopkMethodAndScale) {
  const Json base = with(deepseek_v3(), {{"n_routed_experts", 16}});
  const auto routing = [&](const Json& changes) {
    return first_layer(with(base, changes)).routing;
  };
  EXPECT_FALSE(routing({{"norm_topk_prob", false}}).renormalize);
  EXPECT_EQ(routing({{"routed_scaling_factor", 1}}).routed_scaling_factor, 1.0);
  EXPECT_EQ(routing({{"n_group", 1}, {"topk_group", 1}}).method, RoutingMethod::kTopK);
  const Json v2 = with(base, {{"model_type", "deepseek_v2"}, {"routed_scaling_factor", 16.0}});
  const RoutingSpec greedy = first_layer(with(v2, {{"topk_method", "greedy"}})).routing;
  EXPECT_EQ(greedy.method, RoutingMethod::kTopK);
  EXPECT_EQ(greedy.num_expert_group, 1) << "greedy ignores groups";
  EXPECT_FALSE(greedy.has_correction_bias);
  EXPECT_FALSE(greedy.renormalize);
  EXPECT_EQ(greedy.routed_scaling_factor, 16.0);
}

TEST(ConfigFieldsOf, AliasesAndNesting) {
  for (const char* name : {"num_local_experts", "n_routed_experts", "moe_num_experts"}) {
    EXPECT_EQ(first_layer(with(without(qwen3(), {"num_experts"}), {{name, 16}})).num_experts, 16);
  }
  for (const char* name : {"num_experts_per_token", "experts_per_token", "moe_topk", "moe_k",
                           "moe_top_k", "top_k_experts"}) {
    EXPECT_EQ(
        first_layer(with(without(qwen3(), {"num_experts_per_tok"}), {{name, 3}})).routing.top_k, 3);
  }
  EXPECT_EQ(parse(with(qwen3(), {{"num_local_experts", 8}})).layers.size(), 6U) << "they agree";
  const checkpoint::ModelConfig nested =
      parse({{"model_type", "some_vl"}, {"text_config", qwen3()}, {"torch_dtype", "float16"}});
  EXPECT_EQ(nested.model_type, "qwen3_moe");
  ASSERT_FALSE(nested.layers.empty());
  EXPECT_EQ(nested.layers[0].activation_dtype, DType::kBF16) << "the nested dtype comes first";
  const checkpoint::ModelConfig outer = parse({{"model_type", "some_vl"},
                                               {"text_config", without(qwen3(), {"dtype"})},
                                               {"torch_dtype", "float16"}});
  ASSERT_FALSE(outer.layers.empty());
  EXPECT_EQ(outer.layers[0].activation_dtype, DType::kF16);
}

TEST(ConfigQuant, Fp8BlockAndSkipLists) {
  const Json block = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const auto quant = [&](const Json& changes) {
    return parse(with(deepseek_v3(), {{"quantization_config", with(block, changes)}})).quant;
  };
  EXPECT_EQ(quant(Json::object()).linear.stored, checkpoint::StoredFormat::kFp8Block);
  EXPECT_TRUE(quant({{"scale_fmt", "ue8m0"}}).linear.ue8m0);
  EXPECT_EQ(
      parse({{"model_type", "x"}, {"text_config", deepseek_v3()}, {"quantization_config", block}})
          .quant.linear.stored,
      checkpoint::StoredFormat::kFp8Block);
  EXPECT_EQ(parse(deepseek_v3()).quant.linear.stored, checkpoint::StoredFormat::kPlain);

  const std::vector<std::string_view> leaves = {"gate_proj", "up_proj", "down_proj"};
  const std::string experts = "model.layers.3.mlp.experts";
  const auto skips = [&](const Json& list) {
    return checkpoint::skips_experts(quant({{"modules_to_not_convert", list}}), experts, 2, leaves);
  };
  EXPECT_FALSE(skips({"gate", "self_attn", "lm_head", "model.layers.4.mlp.experts"}).value());
  EXPECT_FALSE(skips({"expert", "layers.3.mlp.shared_experts", "3"}).value());
  EXPECT_TRUE(skips({"experts"}).value());
  EXPECT_TRUE(skips({"mlp.experts"}).value());
  EXPECT_TRUE(skips({"model.layers.3"}).value());
  EXPECT_TRUE(skips({"model.layers.*.mlp"}).value());
  EXPECT_TRUE(skips({"mlp.experts.0", "layers.3.mlp.experts.1"}).value());
  EXPECT_TRUE(skips({"experts.*.gate_proj", "up_proj", "experts.*.down_proj"}).value());
  EXPECT_EQ(mismatch(skips({"model.layers.3.mlp.experts.1"}).status(), StatusCode::kUnsupported,
                     {"3 of 6", "experts.1.gate_proj", "experts.0.gate_proj", "all or none"}),
            "");
  EXPECT_EQ(mismatch(skips({"up_proj"}).status(), StatusCode::kUnsupported, {"2 of 6"}), "");
  const checkpoint::QuantConfig gate_only = quant({{"ignored_layers", {"gate"}}});
  EXPECT_TRUE(checkpoint::skips_module(gate_only, "model.layers.3.mlp.gate"));
  EXPECT_FALSE(checkpoint::skips_module(gate_only, "model.layers.3.mlp.shared_experts.gate_proj"));
}

TEST(ConfigCaps, AreNamed) {
  const auto status = [](const Json& json) {
    return checkpoint::parse_model_config(json.dump()).status();
  };
  EXPECT_EQ(mismatch(status(with(qwen3(), {{"num_experts", checkpoint::kMaxExperts + 1}})),
                     StatusCode::kInvalidArgument, {"num_experts", "16384"}),
            "");
  EXPECT_EQ(mismatch(status(with(qwen3(), {{"num_hidden_layers", checkpoint::kMaxLayers + 1}})),
                     StatusCode::kInvalidArgument, {"num_hidden_layers", "4096"}),
            "");
  EXPECT_EQ(mismatch(status(with(qwen3(), {{"hidden_size", 18446744073709551615ULL}})),
                     StatusCode::kInvalidArgument, {"hidden_size", "18446744073709551615"}),
            "");
  const Json huge = {{"hidden_size", checkpoint::kMaxWidth},
                     {"moe_intermediate_size", checkpoint::kMaxWidth},
                     {"num_experts", checkpoint::kMaxExperts}};
  EXPECT_EQ(mismatch(status(with(qwen3(), huge)), StatusCode::kLimitExceeded, {"63-bit"}), "");
  std::string text = with(qwen3(), {{"x", std::string(checkpoint::kMaxConfigBytes, 'x')}}).dump();
  EXPECT_EQ(checkpoint::parse_model_config(text).status().code(), StatusCode::kLimitExceeded);
  // The largest allowed numbers stay cheap: layers are counted, not tensors.
  EXPECT_EQ(parse(with(qwen3(), {{"num_hidden_layers", checkpoint::kMaxLayers},
                                 {"num_experts", checkpoint::kMaxExperts}}))
                .layers.size(),
            4096U);
}

std::vector<int> moe_layers_of(const Json& json) {
  std::vector<int> layers;
  for (const MoeLayerSpec& spec : parse(json).layers) layers.push_back(spec.layer);
  return layers;
}

Json small(const char* model_type, const Json& more) {
  return with({{"model_type", model_type},
               {"hidden_size", 16},
               {"intermediate_size", 8},
               {"num_hidden_layers", 4},
               {"num_local_experts", 4},
               {"num_experts_per_tok", 2}},
              more);
}

// Which layers are MoE, by the rule of each family.
TEST(LayerRules, EveryFamilyHasItsOwn) {
  const Json eight = {{"num_hidden_layers", 8}};
  EXPECT_EQ(moe_layers_of(small("jamba", eight)), (std::vector<int>{1, 3, 5, 7}));
  EXPECT_EQ(moe_layers_of(small("jamba", {{"expert_layer_period", 3}, {"expert_layer_offset", 0}})),
            (std::vector<int>{0, 3}));
  const Json llama = small("llama4_text", {{"num_experts_per_tok", 1}});
  EXPECT_EQ(moe_layers_of(with(llama, {{"interleave_moe_layer_step", 2}})),
            (std::vector<int>{1, 3}));
  EXPECT_EQ(moe_layers_of(with(llama, {{"moe_layers", {2}}, {"interleave_moe_layer_step", 2}})),
            (std::vector<int>{2}));
  const Json ernie = small("ernie4_5_moe", {{"moe_intermediate_size", 8}});
  EXPECT_EQ(moe_layers_of(with(ernie, {{"moe_layer_start_index", 1},
                                       {"moe_layer_end_index", -1},
                                       {"moe_layer_interval", 1}})),
            (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(moe_layers_of(with(ernie, {{"moe_layer_end_index", 2}, {"moe_layer_interval", 2}})),
            (std::vector<int>{1}));
  const Json step = small("step3", {{"moe_intermediate_size", 8}, {"share_expert_dim", 8}});
  EXPECT_EQ(moe_layers_of(step), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(moe_layers_of(with(step, {{"moe_layers_enum", "0,3"}})), (std::vector<int>{0, 3}));
  const Json nemotron = small(
      "nemotron_h", {{"moe_intermediate_size", 8}, {"moe_shared_expert_intermediate_size", 8}});
  EXPECT_EQ(moe_layers_of(with(nemotron, {{"hybrid_override_pattern", "ME*E"}})),
            (std::vector<int>{1, 3}));
  EXPECT_EQ(moe_layers_of(with(without(nemotron, {"num_hidden_layers"}),
                               {{"layers_block_type", {"moe", "mamba"}}})),
            (std::vector<int>{0}));
  const auto refused = [](const Json& json, std::initializer_list<std::string> words) {
    return mismatch(checkpoint::parse_model_config(json.dump()).status(),
                    StatusCode::kInvalidArgument, words);
  };
  EXPECT_EQ(refused(with(step, {{"moe_layers_enum", "1,x"}}), {"moe_layers_enum", "0 to 3"}), "");
  EXPECT_EQ(refused(with(step, {{"moe_layers_enum", "4"}}), {"moe_layers_enum"}), "");
  EXPECT_EQ(refused(with(nemotron, {{"hybrid_override_pattern", "ME"}}),
                    {"hybrid_override_pattern", "2 entries", "4"}),
            "");
  EXPECT_EQ(refused(with(llama, {{"moe_layers", {4}}}), {"moe_layers"}), "");
}

// Integers that a family lists per layer.
TEST(LayerRules, HunyuanListsPerLayer) {
  const Json json = small("hunyuan", {{"num_hidden_layers", 2},
                                      {"num_experts", 4},
                                      {"moe_topk", {1, 3}},
                                      {"moe_intermediate_size", {8, 24}},
                                      {"num_shared_expert", {1, 2}}});
  const checkpoint::ModelConfig config =
      parse(without(json, {"num_experts_per_tok", "num_local_experts"}));
  ASSERT_EQ(config.layers.size(), 2U);
  EXPECT_EQ(config.layers[0].routing.top_k, 1);
  EXPECT_FALSE(config.layers[0].routing.renormalize);
  EXPECT_EQ(config.layers[1].routing.top_k, 3);
  EXPECT_TRUE(config.layers[1].routing.renormalize);
  EXPECT_EQ(config.layers[1].intermediate_size, 24);
  EXPECT_EQ(config.layers[1].shared.intermediate_size, 16);
  EXPECT_EQ(mismatch(checkpoint::parse_model_config(
                         with(without(json, {"num_experts_per_tok"}), {{"moe_topk", {2}}}).dump())
                         .status(),
                     StatusCode::kCorruptFile, {"moe_topk", "layer 1"}),
            "");
}

// The families of family_rows_2026.h: fields that their configurations omit or name differently.
Json v4() { return small("deepseek_v4", {{"moe_intermediate_size", 8}, {"vocab_size", 11}}); }

Json step3p5() { return small("step3p5", {{"moe_intermediate_size", 8}, {"share_expert_dim", 8}}); }

Json gemma4() {
  return with(without(small("gemma4_text", {{"moe_intermediate_size", 8}, {"top_k_experts", 2}}),
                      {"num_experts_per_tok"}),
              {{"enable_moe_block", true}});
}

TEST(Rows2026, DeepSeekV4HashLayers) {
  const auto hashed = [](const Json& json) {
    std::vector<int> layers;
    for (const MoeLayerSpec& spec : parse(json).layers) {
      const bool hash = spec.routing.method == RoutingMethod::kHash;
      if (hash) layers.push_back(spec.layer);
      EXPECT_EQ(spec.routing.has_correction_bias, !hash);
      EXPECT_EQ(spec.hash_vocabulary, hash ? 11 : 0);
      EXPECT_EQ(spec.routing.scoring_func, ScoringFunc::kSqrtSoftplus);
      EXPECT_EQ(spec.activation.limit, 10.0F);
      EXPECT_EQ(spec.routing.routed_scaling_factor, 1.5);
      EXPECT_EQ(spec.shared.intermediate_size, 8);
    }
    return layers;
  };
  EXPECT_EQ(parse(v4()).layers.size(), 4U);
  EXPECT_EQ(hashed(v4()), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(hashed(with(v4(), {{"num_hash_layers", 1}})), (std::vector<int>{0}));
  const Json listed = {{"mlp_layer_types", {"moe", "hash_moe", "moe", "moe"}}};
  EXPECT_EQ(hashed(with(v4(), listed)), (std::vector<int>{1}));
  const auto refused = [](const Json& changes, StatusCode code,
                          std::initializer_list<std::string> words) {
    return mismatch(checkpoint::parse_model_config(with(v4(), changes).dump()).status(), code,
                    words);
  };
  EXPECT_EQ(refused({{"mlp_layer_types", {"moe", "dense", "moe", "moe"}}},
                    StatusCode::kInvalidArgument, {"mlp_layer_types", "dense", "hash_moe"}),
            "");
  EXPECT_EQ(refused({{"mlp_layer_types", {"moe"}}}, StatusCode::kInvalidArgument,
                    {"mlp_layer_types", "1 entries", "4"}),
            "");
  EXPECT_EQ(refused({{"hidden_act", "gelu"}}, StatusCode::kUnsupported,
                    {"hidden_act", "gelu", "swiglu_limit"}),
            "");
}

TEST(Rows2026, StepHasLimitsPerLayer) {
  Json json = with(step3p5(), {{"swiglu_limits", {0.0, nullptr, 7.0, 0}},
                               {"swiglu_limits_shared", {16, 0, nullptr, 2.5}},
                               {"moe_layers_enum", "0,1,2,3"}});
  const checkpoint::ModelConfig config = parse(json);
  ASSERT_EQ(config.layers.size(), 4U);
  constexpr float kNone = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<float, float>> want = {
      {kNone, 16.0F}, {kNone, kNone}, {7.0F, kNone}, {kNone, 2.5F}};
  for (std::size_t i = 0; i < want.size(); ++i) {
    const MoeLayerSpec& spec = config.layers[i];
    EXPECT_EQ(spec.activation.limit, want[i].first) << i;
    EXPECT_EQ(spec.activation.kind,
              want[i].first == kNone ? ActivationKind::kSilu : ActivationKind::kSwigluStep);
    ASSERT_TRUE(spec.shared.activation.has_value());
    EXPECT_EQ(spec.shared.activation->limit, want[i].second) << i;
    EXPECT_TRUE(spec.shared.beside_block && spec.routing.scale_on_output);
  }
  EXPECT_EQ(moe_layers_of(step3p5()), (std::vector<int>{3})) << "from layer 3 on, unsaid";
  const Json plural = with(without(step3p5(), {"share_expert_dim"}), {{"share_expert_dims", 24}});
  EXPECT_EQ(first_layer(plural).shared.intermediate_size, 24);
  const Json types = {{"num_nextn_predict_layers", 1},
                      {"mlp_layer_types", {"dense", "sparse", "dense", "sparse", "sparse"}}};
  EXPECT_EQ(moe_layers_of(with(step3p5(), types)), (std::vector<int>{1, 3}));
  const auto refused = [&](const Json& changes, StatusCode code,
                           std::initializer_list<std::string> words) {
    return mismatch(checkpoint::parse_model_config(with(json, changes).dump()).status(), code,
                    words);
  };
  EXPECT_EQ(
      refused({{"swiglu_limits", {1.0}}}, StatusCode::kCorruptFile, {"swiglu_limits", "layer 1"}),
      "");
  EXPECT_EQ(refused({{"swiglu_limits_shared", {-1.0, 1.0, 1.0, 1.0}}}, StatusCode::kInvalidArgument,
                    {"swiglu_limits_shared", "-1"}),
            "");
  EXPECT_EQ(refused({{"swiglu_limits", {"a", 1, 1, 1}}}, StatusCode::kCorruptFile,
                    {"swiglu_limits", "a number"}),
            "");
}

TEST(Rows2026, NamesAndDefaultsOfTheOthers) {
  const MoeLayerSpec gemma = first_layer(gemma4());
  EXPECT_EQ(gemma.input_norm_eps, 1e-6);
  EXPECT_EQ(gemma.activation.kind, ActivationKind::kGeluTanh);
  EXPECT_TRUE(gemma.routing.has_expert_scale && gemma.routing.renormalize);
  EXPECT_EQ(gemma.prefix, "model.layers.0.experts");
  EXPECT_EQ(first_layer(with(gemma4(), {{"rms_norm_eps", 0.5}})).input_norm_eps, 0.5);
  EXPECT_EQ(layers_of(with(gemma4(), {{"enable_moe_block", false}})), std::vector<int>{});
  EXPECT_EQ(layers_of(without(gemma4(), {"enable_moe_block"})), std::vector<int>{});
  EXPECT_EQ(
      mismatch(
          checkpoint::parse_model_config(with(gemma4(), {{"rms_norm_eps", 0}}).dump()).status(),
          StatusCode::kInvalidArgument, {"rms_norm_eps", "got 0"}),
      "");

  const Json mimo = small("mimo_v2_flash", {{"moe_intermediate_size", 8}});
  EXPECT_EQ(moe_layers_of(mimo), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(moe_layers_of(with(mimo, {{"moe_layer_freq", {0, 1, 0, 1}}})),
            (std::vector<int>{1, 3}));
  EXPECT_EQ(
      first_layer(with(mimo, {{"routed_scaling_factor", nullptr}})).routing.routed_scaling_factor,
      1.0);
  EXPECT_EQ(
      mismatch(
          checkpoint::parse_model_config(with(mimo, {{"moe_layer_freq", {1, 1}}}).dump()).status(),
          StatusCode::kInvalidArgument, {"moe_layer_freq", "2 entries", "4"}),
      "");

  const Json kimi = small("kimi_linear", {{"moe_intermediate_size", 8}});
  EXPECT_EQ(moe_layers_of(kimi), (std::vector<int>{1, 2, 3}));
  for (const char* groups : {"num_expert_group", "n_group"}) {
    const RoutingSpec routing = first_layer(with(kimi, {{groups, 2}, {"topk_group", 1}})).routing;
    EXPECT_EQ(routing.num_expert_group, 2) << groups;
    EXPECT_FALSE(routing.group_by_best_two) << "the bias says that";
  }
  EXPECT_EQ(first_layer(kimi).routing.routed_scaling_factor, 2.446);
  EXPECT_FALSE(first_layer(with(kimi, {{"moe_renormalize", false}})).routing.renormalize);

  const MoeLayerSpec hy4 = first_layer(small("hy_v4", {{"moe_intermediate_size", 8}}));
  EXPECT_EQ(hy4.layer, 1);
  EXPECT_EQ(hy4.activation.limit, 10.0F);
  ASSERT_TRUE(hy4.shared.activation.has_value());
  EXPECT_EQ(*hy4.shared.activation, ActivationSpec{}) << "SiLU without a limit";

  const Json mistral = small("mistral4", {{"moe_intermediate_size", 8}});
  EXPECT_EQ(moe_layers_of(mistral), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_FALSE(first_layer(mistral).routing.group_by_best_two) << "one group restricts nothing";
  EXPECT_TRUE(
      first_layer(with(mistral, {{"n_group", 2}, {"topk_group", 1}})).routing.group_by_best_two);
}

// Values that a layer here does not compute with are refused by name.
TEST(Rows2026, OtherConstantsAreRefusedByName) {
  struct Case {
    const char* family;
    Json field;
    std::string got, need;
  };
  const std::vector<Case> cases = {
      {"deepseek_v4", {{"norm_topk_prob", false}}, "false", "true"},
      {"deepseek_v4", {{"n_shared_experts", 2}}, "2", "1"},
      {"deepseek_v4", {{"mlp_bias", true}}, "true", "false"},
      {"deepseek_v4", {{"topk_method", "greedy"}}, "greedy", "noaux_tc"},
      {"deepseek_v4", {{"n_group", 4}}, "4", "1"},
      {"deepseek_v4", {{"expert_dtype", "fp4"}}, "fp4", "fp8"},
      {"mistral4", {{"moe_layer_freq", 2}}, "2", "1"},
      {"mistral4", {{"scoring_func", "sigmoid"}}, "sigmoid", "softmax"},
      {"kimi_linear", {{"moe_router_activation_func", "softmax"}}, "softmax", "sigmoid"},
      {"kimi_linear", {{"use_grouped_topk", false}}, "false", "true"},
      {"kimi_linear", {{"norm_topk_prob", false}}, "false", "true"},
      {"mimo_v2_flash", {{"n_shared_experts", 1}}, "1", "0"},
      {"mimo_v2_flash", {{"scoring_func", "softmax"}}, "softmax", "sigmoid"},
      {"step3p5", {{"moe_router_activation", "softmax"}}, "softmax", "sigmoid"},
      {"step3p5", {{"use_moe_router_bias", false}}, "false", "true"},
      {"step3p5", {{"norm_expert_weight", false}}, "false", "true"},
      {"step3p5", {{"hidden_act", "gelu"}}, "gelu", "silu"},
      {"step3p5", {{"mlp_bias", true}}, "true", "false"},
  };
  for (const Case& c : cases) {
    Json base = small(c.family, {{"moe_intermediate_size", 8}, {"vocab_size", 11}});
    if (base["model_type"] == "step3p5") {
      base.update({{"share_expert_dim", 8}, {"moe_layers_enum", "0,1,2,3"}});
    }
    const std::string name = c.field.begin().key();
    EXPECT_EQ(mismatch(checkpoint::parse_model_config(with(base, c.field).dump()).status(),
                       StatusCode::kUnsupported, {name, "got", c.got, "need", c.need}),
              "")
        << c.family;
    EXPECT_FALSE(parse(with(base, {{name, nullptr}})).layers.empty()) << "null says nothing";
  }
}

// The table itself: every row is complete and consistent.
TEST(Families, TablesAreSound) {
  std::set<std::string_view> types;
  for (const checkpoint::Family& family : checkpoint::families()) {
    SCOPED_TRACE(family.title);
    for (const std::string_view type : family.model_types.list()) {
      EXPECT_TRUE(types.insert(type).second) << type << " belongs to two families";
      EXPECT_EQ(checkpoint::find_family(type), &family);
    }
    EXPECT_FALSE(family.width_fields.list().empty());
    EXPECT_TRUE(family.layouts[0].present());
    EXPECT_EQ(family.routing.bias == checkpoint::BiasRule::kNone,
              family.correction_bias.list().empty());
    EXPECT_EQ(family.shared == checkpoint::SharedRule::kNone, family.shared_layout.down.empty());
    for (const checkpoint::ExpertLayout& layout : family.layouts) {
      if (!layout.present()) continue;
      const bool per_expert = checkpoint::is_per_expert(layout.storage);
      EXPECT_EQ(per_expert, layout.down.find("{e}") != std::string_view::npos);
      EXPECT_EQ(checkpoint::is_fused(layout.storage), layout.up.empty());
      EXPECT_EQ(layout.gate.empty(), !is_gated(family.activation.kind));
      EXPECT_FALSE(layout.block.empty() && family.router_beside_block);
      EXPECT_FALSE(layout.weight_suffixes.list().empty());
      EXPECT_EQ(layout.bias_suffix.empty(), family.layouts[0].bias_suffix.empty());
    }
  }
  EXPECT_GE(types.size(), 37U);
  EXPECT_EQ(checkpoint::find_family("llama"), nullptr);
  EXPECT_EQ(checkpoint::find_family(""), nullptr);
}

TEST(Families, PatternsMatchWholeNumbersOnly) {
  EXPECT_EQ(checkpoint::expand_expert("experts.{e}.w1", 11), "experts.11.w1");
  EXPECT_TRUE(checkpoint::matches_pattern("experts.{e}.w1", "experts.11.w1"));
  for (const char* name : {"experts..w1", "experts.1x.w1", "experts.1.w2", "experts.1.w11",
                           "shared_experts.1.w1", "experts.-1.w1"}) {
    EXPECT_FALSE(checkpoint::matches_pattern("experts.{e}.w1", name)) << name;
  }
  EXPECT_TRUE(checkpoint::matches_pattern("experts.gate_up_proj", "experts.gate_up_proj"));
  EXPECT_FALSE(checkpoint::matches_pattern("experts.gate_up_proj", "experts.gate_up_proj_bias"));
}

// Released sizes: the shapes that a real checkpoint has.
TEST(LayerPlan, ReleasedShapes) {
  Json json = deepseek_v3();
  json["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const checkpoint::ModelConfig config = parse(json);
  checkpoint::LayerSource source;
  ASSERT_FALSE(config.layers.empty());
  source.spec = config.layers[0];
  source.family = config.family;
  source.layout = &config.family->layouts[0];
  source.shared_layout = &config.family->shared_layout;
  source.weight_suffix = source.layout->weight_suffixes.list()[0];
  source.gate_weight = config.family->gate_weight;
  source.correction_bias = config.family->correction_bias.list()[0];
  source.experts.stored = source.shared.stored = checkpoint::StoredFormat::kFp8Block;
  source.experts_dtype = source.shared_dtype = DType::kF8E4M3;
  const std::vector<checkpoint::PlannedTensor> plan = checkpoint::plan_layer(source);
  EXPECT_EQ(plan.size(), 2U + 6U + 256U * 6U);
  std::map<std::string, std::string> shapes;
  for (const checkpoint::PlannedTensor& t : plan) shapes[t.name] = t.shape.to_string();
  EXPECT_EQ(shapes.size(), plan.size()) << "names are distinct";
  const std::string p = "model.layers.3.mlp.";
  EXPECT_EQ(shapes[p + "gate.weight"], "[256, 7168]");
  EXPECT_EQ(shapes[p + "gate.e_score_correction_bias"], "[256]");
  EXPECT_EQ(shapes[p + "experts.255.gate_proj.weight"], "[2048, 7168]");
  EXPECT_EQ(shapes[p + "experts.255.gate_proj.weight_scale_inv"], "[16, 56]");
  EXPECT_EQ(shapes[p + "experts.0.down_proj.weight_scale_inv"], "[56, 16]");
  EXPECT_EQ(shapes[p + "shared_experts.up_proj.weight"], "[2048, 7168]");
}

// DeepSeek-V4's released names: scales beside their weights, tables of token ids.
TEST(LayerPlan, DeepSeekV4) {
  Json json = with(v4(), {{"hidden_size", 256}, {"moe_intermediate_size", 128}});
  json["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const checkpoint::ModelConfig config = parse(json);
  ASSERT_EQ(config.layers.size(), 4U);
  checkpoint::LayerSource source;
  source.family = config.family;
  source.layout = &config.family->layouts[0];
  source.shared_layout = &config.family->shared_layout;
  source.weight_suffix = ".weight";
  source.correction_bias = config.family->correction_bias.list()[0];
  source.experts.stored = source.shared.stored = checkpoint::StoredFormat::kFp8Block;
  source.experts_dtype = source.shared_dtype = DType::kF8E4M3;
  const auto shapes_of = [&](std::size_t layer) {
    source.spec = config.layers[layer];
    std::map<std::string, std::string> shapes;
    for (const checkpoint::PlannedTensor& t : checkpoint::plan_layer(source))
      shapes[t.name] = t.shape.to_string();
    return shapes;
  };
  auto hashed = shapes_of(2);
  EXPECT_EQ(hashed.size(), 2U + 6U + 4U * 6U);
  EXPECT_EQ(hashed["model.layers.2.ffn.gate.tid2eid"], "[11, 2]");
  auto scored = shapes_of(3);
  EXPECT_EQ(scored.size(), 2U + 6U + 4U * 6U);
  EXPECT_EQ(scored["model.layers.3.ffn.gate.bias"], "[4]");
  EXPECT_EQ(scored["model.layers.3.ffn.experts.3.w2.scale"], "[2, 1]");
  EXPECT_EQ(scored["model.layers.3.ffn.shared_experts.w1.scale"], "[1, 2]");
}

}  // namespace
}  // namespace moesaic::test
