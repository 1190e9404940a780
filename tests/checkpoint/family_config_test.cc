// The families of transformers 5.23 besides the usual ones: what their configurations must not say,
// which are refused and why, how language models are found inside wrappers.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/config/config.h"
#include "checkpoint/config/refused_families.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

using Json = nlohmann::json;

Json family_config(std::string_view model_type, const Json& more = Json::object()) {
  Json json = {{"model_type", model_type}, {"hidden_size", 16},   {"moe_intermediate_size", 8},
               {"intermediate_size", 8},   {"num_experts", 8},    {"num_experts_per_tok", 2},
               {"num_hidden_layers", 2},   {"dtype", "bfloat16"}, {"first_k_dense_replace", 0},
               {"num_dense_layers", 0}};
  if (model_type == "minimax_m3_vl_text") json["shared_intermediate_size"] = 8;
  json.update(more);
  return json;
}

Status refusal_of(const Json& json) { return checkpoint::parse_model_config(json.dump()).status(); }

TEST(RefusedFamilies, SayWhy) {
  EXPECT_GE(checkpoint::refused_families().size(), 10U);
  for (const checkpoint::RefusedFamily& family : checkpoint::refused_families()) {
    SCOPED_TRACE(family.model_type);
    EXPECT_EQ(checkpoint::find_family(family.model_type), nullptr);
    const Json json = family_config(family.model_type);
    const std::initializer_list<std::string> words = {
        "model_type", std::string(family.model_type),
        "not supported: " + std::string(family.reason)};
    EXPECT_EQ(mismatch(refusal_of(json), StatusCode::kUnsupported, words), "");
    const Json nested = {{"model_type", "some_wrapper"}, {"text_config", json}};
    EXPECT_EQ(mismatch(refusal_of(nested), StatusCode::kUnsupported, words), "");
  }
  EXPECT_EQ(checkpoint::find_refused_family("mixtral"), nullptr);
}

// The epsilon is of a sum that nothing is divided by without renormalisation.
TEST(TransformersFamilies, Lfm2AddsItsEpsilonOnlyToASum) {
  for (const bool renormalize : {true, false}) {
    Json json = family_config("lfm2_moe", {{"norm_topk_prob", renormalize}});
    json.erase("first_k_dense_replace");
    const auto config = checkpoint::parse_model_config(json.dump());
    ASSERT_TRUE(config.ok()) << config.status().to_string();
    const RoutingSpec& routing = config->layers.front().routing;
    EXPECT_EQ(routing.renormalize, renormalize);
    EXPECT_EQ(routing.renorm_epsilon, renormalize ? 1e-6 : 0.0);
  }
}

TEST(TransformersFamilies, RefuseWhatTheirBlockIsNotComputedWith) {
  const auto refused = [](std::string_view type, const Json& more,
                          std::initializer_list<std::string> words) {
    return std::string(type) + ": " +
           mismatch(refusal_of(family_config(type, more)), StatusCode::kUnsupported, words);
  };
  const std::string strategy = "shared_expert_combination_strategy";
  EXPECT_EQ(refused("cohere2_moe", {{"num_shared_experts", 1}}, {strategy, "sum"}),
            "cohere2_moe: ");
  EXPECT_EQ(refused("cohere2_moe", {{"num_shared_experts", 1}, {strategy, "average"}},
                    {strategy, "average", "sum"}),
            "cohere2_moe: ");
  EXPECT_EQ(refused("cohere2_moe", {{"expert_selection_fn", "sqrtsoftplus"}},
                    {"expert_selection_fn", "sigmoid"}),
            "cohere2_moe: ");
  EXPECT_EQ(refused("axk2", {{"n_group", 4}, {"topk_group", 2}}, {"n_group", "4", "1"}), "axk2: ");
  const Json shared = {{"shared_expert_intermediate_size", 8}};
  for (const Json& more : {Json{{"moe_router_logit_softcapping", 30.0}},
                           Json{{"moe_apply_router_weight_on_input", true}}}) {
    Json both = shared;
    both.update(more);
    EXPECT_EQ(refused("laguna", both, {more.begin().key(), "Laguna"}), "laguna: ");
  }
  EXPECT_EQ(refused("afmoe", {{"score_func", "softmax"}}, {"score_func", "softmax", "sigmoid"}),
            "afmoe: ");
  EXPECT_EQ(refused("afmoe", {{"route_norm", false}}, {"route_norm", "true"}), "afmoe: ");
  EXPECT_EQ(refused("aria_text", {{"hidden_act", "gelu"}}, {"hidden_act", "gelu", "silu"}),
            "aria_text: ");
  EXPECT_EQ(refused("minimax_m3_vl_text", {{"hidden_act", "gelu"}}, {"hidden_act", "gelu"}),
            "minimax_m3_vl_text: ");
  EXPECT_EQ(refused("inkling2_text", {{"scoring_func", "softmax"}}, {"scoring_func", "sigmoid"}),
            "inkling2_text: ");
  EXPECT_EQ(refused("solar_open", {{"mlp_bias", true}}, {"mlp_bias"}), "solar_open: ");
  EXPECT_EQ(mismatch(refusal_of(family_config("inkling2_text", {{"mlp_up_softcap", 0}})),
                     StatusCode::kInvalidArgument, {"mlp_up_softcap", "> 0"}),
            "");
  // A field without effect is accepted: without shared experts there is nothing to average.
  const Json none =
      family_config("cohere2_moe", {{"shared_expert_combination_strategy", "average"}});
  EXPECT_TRUE(refusal_of(none).ok()) << refusal_of(none).to_string();
}

TEST(TransformersFamilies, LanguageModelOfATalkingWrapper) {
  const Json text = family_config("qwen3_omni_moe_text");
  const Json speaks = {{"model_type", "qwen3_omni_moe"},
                       {"thinker_config", {{"model_type", "thinker"}, {"text_config", text}}},
                       {"talker_config", {{"text_config", {{"model_type", "talker"}}}}}};
  const auto config = checkpoint::parse_model_config(speaks.dump());
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->model_type, "qwen3_omni_moe_text");
  EXPECT_EQ(config->layers.size(), 2U);
  Json broken = speaks;
  broken["thinker_config"]["text_config"].erase("model_type");
  EXPECT_EQ(mismatch(refusal_of(broken), StatusCode::kCorruptFile,
                     {"config.json: thinker_config: text_config", "model_type"}),
            "");
}

}  // namespace
}  // namespace moesaic::test
