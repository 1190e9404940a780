// Models of 2026 (family_rows_2026.h, family_rows_biased_sigmoid.h): fields that their configurations
// omit or name differently.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/config_support.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

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
  const checkpoint::ModelConfig sigmoid = parse(with(v4(), {{"scoring_func", "sigmoid"}}));
  EXPECT_EQ(sigmoid.layers.at(0).routing.scoring_func, ScoringFunc::kSigmoid);
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
  EXPECT_EQ(layers_of(step3p5()), (std::vector<int>{3})) << "from layer 3 on, unsaid";
  const Json plural = with(without(step3p5(), {"share_expert_dim"}), {{"share_expert_dims", 24}});
  EXPECT_EQ(first_layer(plural).shared.intermediate_size, 24);
  const Json types = {{"num_nextn_predict_layers", 1},
                      {"mlp_layer_types", {"dense", "sparse", "dense", "sparse", "sparse"}}};
  EXPECT_EQ(layers_of(with(step3p5(), types)), (std::vector<int>{1, 3}));
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
  EXPECT_EQ(layers_of(mimo), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(layers_of(with(mimo, {{"moe_layer_freq", {0, 1, 0, 1}}})), (std::vector<int>{1, 3}));
  EXPECT_EQ(
      first_layer(with(mimo, {{"routed_scaling_factor", nullptr}})).routing.routed_scaling_factor,
      1.0);
  EXPECT_EQ(
      mismatch(
          checkpoint::parse_model_config(with(mimo, {{"moe_layer_freq", {1, 1}}}).dump()).status(),
          StatusCode::kInvalidArgument, {"moe_layer_freq", "2 entries", "4"}),
      "");

  // As published.
  const Json kimi = with(small("kimi_linear", {{"moe_intermediate_size", 8}}), kimi_numbers());
  EXPECT_EQ(layers_of(kimi), (std::vector<int>{1, 2, 3}));
  for (const auto& [field, reading] :
       {std::pair{"first_k_dense_replace", "all but the first"},
        std::pair{"num_shared_experts", "has one"}, std::pair{"routed_scaling_factor", "2.446"}}) {
    EXPECT_EQ(mismatch(checkpoint::parse_model_config(without(kimi, {field}).dump()).status(),
                       StatusCode::kAmbiguousFormat,
                       {field, "missing", "a number", "the model's own code", reading}),
              "");
  }
  EXPECT_EQ(layers_of(with(without(kimi, {"first_k_dense_replace"}),
                           {{"mlp_layer_types", {"sparse", "dense", "dense", "sparse"}}})),
            (std::vector<int>{0, 3}));
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
  EXPECT_EQ(layers_of(mistral), (std::vector<int>{0, 1, 2, 3}));
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
    if (base["model_type"] == "kimi_linear") base.update(kimi_numbers());
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

}  // namespace
}  // namespace moesaic::test
