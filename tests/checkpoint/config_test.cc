// parse_model_config: which layers are MoE, defaults, aliases, caps; skip lists.
#include "checkpoint/config/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/config/python_constants.h"
#include "checkpoint/config_support.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

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
  const Json v2 = with(
      base,
      {{"model_type", "deepseek_v2"}, {"routed_scaling_factor", 16.0}, {"n_shared_experts", 2}});
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

// Python writes numbers that JSON lacks: "time_step_limit": [0.0, Infinity] of Nemotron-H.
TEST(ConfigFieldsOf, NumbersThatPythonWrites) {
  const std::string plain = without(qwen3(), {"hidden_size"}).dump();
  const auto parse = [&](const std::string& members) {
    return checkpoint::parse_model_config("{" + members + "," + plain.substr(1));
  };
  EXPECT_TRUE(parse(R"("hidden_size":64,"limit":[0.0, Infinity,-Infinity],"n":NaN)").ok());
  EXPECT_TRUE(parse(R"("hidden_size":64,"text":"\\\"Infinity","other":"NaN\\","n":Infinity)").ok());
  // Where a field is read it is no number.
  EXPECT_EQ(mismatch(parse(R"("hidden_size":Infinity)").status(), StatusCode::kCorruptFile,
                     {"hidden_size", "Infinity", "need an integer"}),
            "");
  for (const char* wrong : {"-NaN", "Infinityx", "+Infinity", "infinity", "1Infinity", "nan"}) {
    EXPECT_EQ(mismatch(parse(std::string(R"("n":)") + wrong).status(), StatusCode::kCorruptFile,
                       {"not valid JSON"}),
              "")
        << wrong;
  }
}

TEST(PythonConstants, ReadAndWrittenAsTheyWere) {
  for (const std::string_view text :
       {R"({"a": [Infinity, -Infinity, NaN], "b": "Infinity \" NaN", "c": "\\"})", R"(["\", NaN)",
        R"({"x": "\"__float__ NaN"})", "Infinity", "", "\"Infinity", "-Infinity]"}) {
    EXPECT_EQ(checkpoint::unquote_python_constants(checkpoint::quote_python_constants(text)), text);
  }
  EXPECT_EQ(checkpoint::quote_python_constants("[NaN,-Infinity]"),
            R"(["__float__ NaN","__float__ -Infinity"])");
}

TEST(ConfigQuant, Fp8BlockAndSkipLists) {
  const Json block = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const auto quant = [&](const Json& changes) {
    return parse(with(deepseek_v3(), {{"quantization_config", with(block, changes)}})).quant;
  };
  EXPECT_EQ(quant(Json::object()).linear.stored, checkpoint::StoredFormat::kFp8Block);
  EXPECT_EQ(quant(Json::object()).linear.block, (quant::BlockShape{128, 128}));
  EXPECT_EQ(quant({{"weight_block_size", {64, 32}}}).linear.block, (quant::BlockShape{64, 32}));
  EXPECT_TRUE(quant({{"scale_fmt", "ue8m0"}}).linear.ue8m0);
  for (const char* name : {"e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"}) {
    EXPECT_EQ(quant({{"fmt", name}}).linear.stored, checkpoint::StoredFormat::kFp8Block) << name;
  }
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
  // MiniMax-M2's list.
  EXPECT_FALSE(skips({"gate", "e_score_correction_bias", "lm_head"}).value());
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

// Which layers are MoE, by the rule of each family.
TEST(LayerRules, EveryFamilyHasItsOwn) {
  const Json eight = {{"num_hidden_layers", 8}};
  EXPECT_EQ(layers_of(small("jamba", eight)), (std::vector<int>{1, 3, 5, 7}));
  EXPECT_EQ(layers_of(small("jamba", {{"expert_layer_period", 3}, {"expert_layer_offset", 0}})),
            (std::vector<int>{0, 3}));
  const Json llama = small("llama4_text", {{"num_experts_per_tok", 1}});
  EXPECT_EQ(layers_of(with(llama, {{"interleave_moe_layer_step", 2}})), (std::vector<int>{1, 3}));
  EXPECT_EQ(layers_of(with(llama, {{"moe_layers", {2}}, {"interleave_moe_layer_step", 2}})),
            (std::vector<int>{2}));
  const Json ernie =
      small("ernie4_5_moe", {{"moe_intermediate_size", 8}, {"moe_num_shared_experts", 2}});
  EXPECT_EQ(layers_of(with(ernie, {{"moe_layer_start_index", 1},
                                   {"moe_layer_end_index", -1},
                                   {"moe_layer_interval", 1}})),
            (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(layers_of(with(ernie, {{"moe_layer_end_index", 2}, {"moe_layer_interval", 2}})),
            (std::vector<int>{1}));
  const Json step = small("step3", {{"moe_intermediate_size", 8}, {"share_expert_dim", 8}});
  EXPECT_EQ(layers_of(step), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(layers_of(with(step, {{"moe_layers_enum", "0,3"}})), (std::vector<int>{0, 3}));
  const Json nemotron = small(
      "nemotron_h", {{"moe_intermediate_size", 8}, {"moe_shared_expert_intermediate_size", 8}});
  EXPECT_EQ(layers_of(with(nemotron, {{"hybrid_override_pattern", "ME*E"}})),
            (std::vector<int>{1, 3}));
  EXPECT_EQ(layers_of(with(without(nemotron, {"num_hidden_layers"}),
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

// K-EXAONE lists its layers under another name than transformers does.
TEST(LayerRules, ExaoneFlagsItsLayers) {
  const Json exaone = small("exaone_moe", {{"moe_intermediate_size", 8},
                                           {"first_last_k_dense_replace", 2},
                                           {"topk_method", "noaux_tc"},
                                           {"scoring_func", "sigmoid"}});
  EXPECT_EQ(layers_of(exaone), (std::vector<int>{2, 3}));
  EXPECT_EQ(layers_of(with(exaone, {{"is_moe_layer", {false, true, true, false}}})),
            (std::vector<int>{1, 2}));
  EXPECT_EQ(
      layers_of(with(exaone, {{"is_moe_layer", {0, 1, 1, 1, 0}}, {"num_nextn_predict_layers", 1}})),
      (std::vector<int>{1, 2, 3}));
  const Json types = {{"mlp_layer_types", {"dense", "sparse", "sparse", "sparse"}}};
  EXPECT_EQ(layers_of(with(with(exaone, types), {{"is_moe_layer", {false, true, true, true}}})),
            (std::vector<int>{1, 2, 3}));
  const auto refused = [&](const Json& changes, StatusCode code,
                           std::initializer_list<std::string> words) {
    return mismatch(checkpoint::parse_model_config(with(exaone, changes).dump()).status(), code,
                    words);
  };
  EXPECT_EQ(refused(with(types, {{"is_moe_layer", {false, true, false, true}}}),
                    StatusCode::kAmbiguousFormat,
                    {"mlp_layer_types[2] is sparse", "is_moe_layer[2] is false", "agree"}),
            "");
  EXPECT_EQ(refused({{"is_moe_layer", {true}}}, StatusCode::kInvalidArgument,
                    {"is_moe_layer", "1 entries", "4"}),
            "");
  EXPECT_EQ(refused({{"is_moe_layer", {true, true, 2, true}}}, StatusCode::kCorruptFile,
                    {"is_moe_layer[2]", "got 2", "true or false"}),
            "");
  EXPECT_EQ(
      refused({{"is_moe_layer", true}}, StatusCode::kCorruptFile, {"is_moe_layer", "a list of"}),
      "");
  EXPECT_EQ(refused({{"first_k_dense_replace", 1}}, StatusCode::kAmbiguousFormat,
                    {"first_k_dense_replace is 1", "first_last_k_dense_replace"}),
            "");
  EXPECT_EQ(refused({{"topk_method", "greedy"}}, StatusCode::kUnsupported, {"topk_method"}), "");
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

}  // namespace
}  // namespace moesaic::test
