// Fields whose defaults, other names and forms differ between families: what transformers 5.24 reads
// from the files that the models' authors published.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/config/config.h"
#include "checkpoint/config/families.h"
#include "checkpoint/config_support.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

using Words = std::initializer_list<std::string>;

Json sized(const char* model_type, const Json& more = Json::object()) {
  Json json = small(model_type, {{"moe_intermediate_size", 8}});
  if (json["model_type"] == "kimi_linear") json.update(kimi_numbers());
  return with(std::move(json), more);
}

std::string refused(const Json& json, StatusCode code, Words words) {
  return mismatch(checkpoint::parse_model_config(json.dump()).status(), code, words);
}

TEST(FamilyLayers, JambaWithOneExpertHasNone) {
  const checkpoint::ModelConfig config = parse(small("jamba", {{"num_local_experts", 1}}));
  EXPECT_TRUE(config.layers.empty());
  EXPECT_EQ(config.no_experts, "num_local_experts: got 1");
  EXPECT_EQ(layers_of(small("mixtral", {{"num_local_experts", 1}, {"num_experts_per_tok", 1}})),
            (std::vector<int>{0, 1, 2, 3}));
}

TEST(FamilyLayers, FlintStartsWithTwoDenseOnes) {
  const Json flint = sized("flint", {{"shared_expert_intermediate_size", 8}});
  EXPECT_EQ(layers_of(flint), (std::vector<int>{2, 3}));
  EXPECT_EQ(layers_of(with(flint, {{"mlp_only_layers", nullptr}})), (std::vector<int>{2, 3}));
  EXPECT_EQ(layers_of(with(flint, {{"mlp_only_layers", Json::array()}})),
            (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(layers_of(with(flint, {{"mlp_only_layers", {3}}})), (std::vector<int>{0, 1, 2}));
}

TEST(FamilyLayers, OpticalReadersDiffer) {
  const Json two = {{"n_shared_experts", 2}};
  EXPECT_EQ(layers_of(sized("unlimited_ocr_text", two)), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(layers_of(sized("deepseek_ocr2_text", two)), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(layers_of(sized("deepseek_v2", two)), (std::vector<int>{0, 1, 2, 3}));
}

// mlp_layer_types says which layers are MoE only where the model's own code asks it.
TEST(FamilyLayers, TypesAreReadWhereTheFamilyHasThem) {
  const Json types = {{"mlp_layer_types", {"dense", "sparse", "dense", "sparse"}}};
  for (const char* type :
       {"axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v32", "dots3_note_text",
        "exaone_moe", "glm4_moe_lite", "glm5_next_text", "glm_moe_dsa", "hy_v3", "hy_v4",
        "hy_v4_vl_text", "kimi_linear", "mellum", "mimo_v2_flash", "mistral_large4_text"}) {
    Json json = sized(type, types);
    if (std::string_view(type) == "bailing_hybrid" || std::string_view(type) == "axk1" ||
        std::string_view(type) == "deepseek_v32" || std::string_view(type) == "beam") {
      json.update({{"n_group", 1}, {"topk_group", 1}});
    }
    EXPECT_EQ(layers_of(json), (std::vector<int>{1, 3})) << type;
  }
  for (const char* type :
       {"afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flint", "glm4_moe",
        "gpt_oss", "jamba", "kimi_k2", "lara_mini", "lfm2_moe", "mistral4", "mixtral", "olmoe",
        "qwen2_moe", "qwen3_moe", "sarvam_moe", "solar_open"}) {
    const Json json = with(sized(type, types), {{"n_group", 1},
                                                {"topk_group", 1},
                                                {"n_shared_experts", 0},
                                                {"moe_num_shared_experts", 0},
                                                {"shared_expert_intermediate_size", 0}});
    const Status status = checkpoint::parse_model_config(json.dump()).status();
    EXPECT_FALSE(status.ok()) << type;
    const Json alone =
        with(sized(type, types),
             std::string_view(type) == "deepseek_v2"    ? Json{{"n_shared_experts", 2}}
             : std::string_view(type) == "ernie4_5_moe" ? Json{{"moe_num_shared_experts", 2}}
             : std::string_view(type) == "flint" || std::string_view(type) == "lara_mini" ||
                     std::string_view(type) == "qwen2_moe"
                 ? Json{{"shared_expert_intermediate_size", 8}}
             : std::string_view(type) == "deepseek_v3" ? Json{{"n_group", 1}, {"topk_group", 1}}
                                                       : Json::object());
    EXPECT_EQ(refused(alone, StatusCode::kUnsupported, {"mlp_layer_types", "a list of 4"}), "")
        << type;
    EXPECT_TRUE(
        checkpoint::parse_model_config(with(alone, {{"mlp_layer_types", nullptr}}).dump()).ok())
        << type;
  }
}

TEST(FamilyLayers, FrequenciesAndEnumerationsAsLists) {
  const Json m3 = small("minimax_m3_vl_text", {{"shared_intermediate_size", 8}});
  EXPECT_EQ(layers_of(m3), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(layers_of(with(m3, {{"moe_layer_freq", {0, 0, 1, 1}}})), (std::vector<int>{2, 3}));
  const Json dots = sized("dots3_note_text");
  EXPECT_EQ(layers_of(with(dots, {{"moe_layer_freq", {1, 0, 1, 1}}})), (std::vector<int>{2, 3}));
  EXPECT_EQ(layers_of(with(dots, {{"moe_layer_freq", 2}})), (std::vector<int>{2}));
  EXPECT_EQ(refused(with(dots, {{"moe_layer_freq", {1, 1}}}), StatusCode::kInvalidArgument,
                    {"moe_layer_freq", "2 entries", "4"}),
            "");
  EXPECT_EQ(refused(with(deepseek_v3(), {{"moe_layer_freq", {0, 1}}}), StatusCode::kCorruptFile,
                    {"moe_layer_freq", "an integer"}),
            "");
  const Json step = sized("step3p5", {{"share_expert_dim", 8}});
  EXPECT_EQ(layers_of(with(step, {{"moe_layers_enum", {1, 2}}})), (std::vector<int>{1, 2}));
  EXPECT_EQ(refused(with(step, {{"moe_layers_enum", {1, 4}}}), StatusCode::kInvalidArgument,
                    {"moe_layers_enum[1]", "got 4", "0 to 3"}),
            "");
  EXPECT_EQ(layers_of(sized("solar_open", {{"moe_layer_freq", 1}})),
            (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(refused(sized("solar_open", {{"moe_layer_freq", 2}}), StatusCode::kUnsupported,
                    {"moe_layer_freq", "got 2", "need 1"}),
            "");
}

// A file without the number of shared experts: the models' own code and transformers disagree.
TEST(FamilyShared, UnsaidCountsAreAmbiguous) {
  const auto ambiguous = [](const char* type, const char* field) {
    EXPECT_EQ(refused(sized(type), StatusCode::kAmbiguousFormat,
                      {field, "missing", "0: none", "transformers has two"}),
              "")
        << type;
    EXPECT_EQ(first_layer(sized(type, {{field, 2}})).shared.intermediate_size, 16) << type;
    EXPECT_EQ(first_layer(sized(type, {{field, 0}})).shared.intermediate_size, 0) << type;
    EXPECT_EQ(first_layer(sized(type, {{field, nullptr}})).shared.intermediate_size, 0) << type;
  };
  for (const char* type : {"deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"}) {
    ambiguous(type, "n_shared_experts");
  }
  ambiguous("ernie4_5_moe", "moe_num_shared_experts");
}

TEST(FamilyShared, OtherNamesAndWidths) {
  for (const char* type : {"kimi_linear", "bailing_hybrid", "sarvam_mla", "sarvam_moe"}) {
    const Json json =
        without(sized(type, {{"n_group", 1}, {"topk_group", 1}, {"num_hidden_layers", 4}}),
                {"num_shared_experts"});
    for (const char* field : {"n_shared_experts", "num_shared_experts"}) {
      EXPECT_EQ(first_layer(with(json, {{field, 3}})).shared.intermediate_size, 24) << type;
      EXPECT_EQ(first_layer(with(json, {{field, nullptr}})).shared.intermediate_size, 0) << type;
    }
    EXPECT_EQ(refused(with(json, {{"n_shared_experts", 1}, {"num_shared_experts", 2}}),
                      StatusCode::kAmbiguousFormat, {"n_shared_experts", "num_shared_experts"}),
              "");
  }
  const Json dots = sized("dots3_note_text", {{"topk_method", "noaux_tc"}});
  EXPECT_EQ(first_layer(dots).shared.intermediate_size, 1536);
  for (const char* field :
       {"shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"}) {
    EXPECT_EQ(
        first_layer(with(dots, {{field, 40}, {"n_shared_experts", 2}})).shared.intermediate_size,
        80);
  }
  const Json m3 = small("minimax_m3_vl_text", {{"shared_intermediate_size", 24}});
  EXPECT_EQ(first_layer(with(m3, {{"n_shared_experts", 1}})).shared.intermediate_size, 24);
  EXPECT_EQ(refused(with(m3, {{"n_shared_experts", 2}}), StatusCode::kAmbiguousFormat,
                    {"n_shared_experts", "got 2", "need 1", "SGLang"}),
            "");
  const Json ling = sized("bailing_hybrid", {{"n_group", 1}, {"topk_group", 1}});
  const char* repeated = "moe_shared_expert_intermediate_size";
  EXPECT_EQ(first_layer(with(ling, {{repeated, 8}})).shared.intermediate_size, 8);
  for (const Json& other : {Json{{repeated, 16}}, Json{{repeated, 8}, {"num_shared_experts", 2}},
                            Json{{repeated, 8}, {"num_shared_experts", 0}}}) {
    EXPECT_EQ(refused(with(ling, other), StatusCode::kAmbiguousFormat,
                      {repeated, "need 8 with 1", "others take it"}),
              "");
  }
}

TEST(FamilyWidths, HasAnotherName) {
  const Json named = with(without(sized("hy_v3"), {"moe_intermediate_size"}),
                          {{"expert_hidden_dim", 24},
                           {"route_norm", true},
                           {"moe_router_use_sigmoid", true},
                           {"moe_router_enable_expert_bias", true}});
  EXPECT_EQ(first_layer(named).intermediate_size, 24);
  EXPECT_EQ(first_layer(with(named, {{"moe_intermediate_size", 24}})).intermediate_size, 24);
  EXPECT_EQ(refused(with(named, {{"moe_intermediate_size", 8}}), StatusCode::kAmbiguousFormat,
                    {"moe_intermediate_size", "expert_hidden_dim"}),
            "");
}

TEST(FamilyRouting, RenormalisationHasTwoNames) {
  for (const char* type : {"kimi_linear", "bailing_hybrid"}) {
    const Json json = sized(type, {{"n_group", 1}, {"topk_group", 1}});
    EXPECT_TRUE(first_layer(json).routing.renormalize);
    for (const char* field : {"norm_topk_prob", "moe_renormalize"}) {
      EXPECT_FALSE(first_layer(with(json, {{field, false}})).routing.renormalize) << type << field;
    }
    EXPECT_FALSE(first_layer(with(json, {{"norm_topk_prob", false}, {"moe_renormalize", false}}))
                     .routing.renormalize);
    EXPECT_EQ(refused(with(json, {{"norm_topk_prob", false}, {"moe_renormalize", true}}),
                      StatusCode::kAmbiguousFormat, {"norm_topk_prob", "moe_renormalize"}),
              "");
  }
}

// What published files say and every implementation computes; anything else is refused by name.
TEST(FamilyRouting, StatedConstants) {
  struct Case {
    const char* type;
    Json stated, other;
  };
  const std::vector<Case> cases = {
      {"axk1", {{"topk_method", "noaux_tc"}}, {{"topk_method", "greedy"}}},
      {"axk2", {{"topk_method", "noaux_tc"}}, {{"topk_method", "greedy"}}},
      {"dots3_note_text", {{"topk_method", "noaux_tc"}}, {{"topk_method", "greedy"}}},
      {"glm5_next_text", {{"topk_method", "noaux_tc"}}, {{"topk_method", "greedy"}}},
      {"hy_v4", {{"topk_method", "noaux_tc"}}, {{"topk_method", "greedy"}}},
      {"solar_open", {{"topk_method", "noaux_tc"}}, {{"topk_method", "greedy"}}},
      {"kimi_linear", {{"topk_method", "noaux_tc"}}, {{"topk_method", "greedy"}}},
      {"hy_v3", {{"route_norm", true}}, {{"route_norm", false}}},
      {"hy_v3", {{"moe_router_use_sigmoid", true}}, {{"moe_router_use_sigmoid", false}}},
      {"hy_v3",
       {{"moe_router_enable_expert_bias", true}},
       {{"moe_router_enable_expert_bias", false}}},
      {"laguna", {{"moe_router_use_sigmoid", true}}, {{"moe_router_use_sigmoid", false}}},
      {"laguna", {{"moe_router_score_func", "sigmoid"}}, {{"moe_router_score_func", "softmax"}}},
      {"bailing_hybrid", {{"score_function", "sigmoid"}}, {{"score_function", "softmax"}}},
      {"bailing_hybrid",
       {{"moe_router_enable_expert_bias", true}},
       {{"moe_router_enable_expert_bias", false}}},
      {"bailing_hybrid",
       {{"moe_router_enable_routed_scaling", true}},
       {{"moe_router_enable_routed_scaling", false}}},
      {"bailing_hybrid",
       {{"moe_router_enable_shared_expert", true}},
       {{"moe_router_enable_shared_expert", false}}},
      {"sarvam_moe", {{"score_function", "sigmoid"}}, {{"score_function", "softmax"}}},
      {"minimax_m3_vl_text", {{"swiglu_beta", 1.0}}, {{"swiglu_beta", 0.5}}},
      {"deepseek_v4", {{"scoring_func", "sigmoid"}}, {{"scoring_func", "softmax"}}},
  };
  for (const Case& c : cases) {
    Json json = sized(c.type, {{"num_local_experts", 16},
                               {"num_hidden_layers", 4},
                               {"vocab_size", 11},
                               {"num_hash_layers", 0}});
    const std::string_view type = c.type;
    if (type == "laguna") json["shared_expert_intermediate_size"] = 8;
    if (type == "minimax_m3_vl_text") json["shared_intermediate_size"] = 8;
    const Status stated = checkpoint::parse_model_config(with(json, c.stated).dump()).status();
    EXPECT_TRUE(stated.ok()) << stated.to_string();
    const std::string name = c.other.begin().key();
    EXPECT_EQ(refused(with(json, c.other), StatusCode::kUnsupported, {name, "got", "need"}), "")
        << c.type;
  }
}

// null where a family has a limit: the default, or none?
TEST(FamilyActivation, LimitsAreNotNull) {
  for (const char* type : {"hy_v4", "glm5_next_text", "gpt_oss"}) {
    EXPECT_EQ(refused(sized(type, {{"swiglu_limit", nullptr}}), StatusCode::kAmbiguousFormat,
                      {"swiglu_limit", "got null", "no limit, or the default of"}),
              "")
        << type;
  }
  EXPECT_EQ(refused(with(v4(), {{"swiglu_limit", nullptr}}), StatusCode::kAmbiguousFormat,
                    {"swiglu_limit", "default of 10"}),
            "");
}

// null where the family's default changes something: that default, or what null is to Python?
TEST(FamilyRouting, NullIsNoDefault) {
  struct Case {
    const char *type, *field, *need, *readings;
  };
  const std::vector<Case> cases = {
      {"deepseek_v3", "norm_topk_prob", "true or false", "false, or the default of true"},
      {"glm4_moe", "norm_topk_prob", "true or false", "false, or the default of true"},
      {"kimi_linear", "moe_renormalize", "true or false", "false, or the default of true"},
      {"kimi_linear", "norm_topk_prob", "true or false", "false, or the default of true"},
      {"deepseek_v3", "routed_scaling_factor", "a number", "none, or the default of 2.5"},
      {"kimi_k2", "routed_scaling_factor", "a number", "none, or the default of 2.827"},
      {"laguna", "first_k_dense_replace", "a number", "none, or the default of 1"},
      {"deepseek_v3", "first_k_dense_replace", "a number", "none, or the default of 3"},
      {"lfm2_moe", "num_dense_layers", "a number", "none, or the default of 2"},
      {"deepseek_v3", "n_group", "a number", "none, or the default of 8"},
      {"bailing_hybrid", "n_group", "a number", "none, or the default of 8"},
      {"bailing_hybrid", "num_expert_group", "a number", "none, or the default of 8"},
      {"axk1", "topk_group", "a number", "none, or the default of 4"},
      {"deepseek_v4", "num_hash_layers", "a number", "none, or the default of 3"},
  };
  for (const Case& c : cases) {
    const std::string_view type = c.type, field = c.field;
    Json json = sized(c.type, {{"num_local_experts", 16}, {"vocab_size", 11}});
    if (type == "laguna") json["shared_expert_intermediate_size"] = 8;
    EXPECT_TRUE(checkpoint::parse_model_config(json.dump()).ok()) << type;
    json[c.field] = nullptr;
    EXPECT_EQ(
        refused(json, StatusCode::kAmbiguousFormat, {c.field, "got null", c.need, c.readings}), "")
        << type << ": " << field;
  }
  // The other name says it, or the default changes nothing.
  const Json ling = sized("bailing_hybrid", {{"n_group", 2}, {"topk_group", 1}});
  EXPECT_EQ(first_layer(with(ling, {{"num_expert_group", nullptr}})).routing.num_expert_group, 2);
  EXPECT_FALSE(first_layer(with(ling, {{"norm_topk_prob", nullptr}, {"moe_renormalize", false}}))
                   .routing.renormalize);
  EXPECT_EQ(layers_of(sized("exaone_moe", {{"first_k_dense_replace", nullptr},
                                           {"first_last_k_dense_replace", 2}})),
            (std::vector<int>{2, 3}));
  for (const char* type : {"dots1", "olmoe", "mistral4", "glm4_moe"}) {
    const Json nulls = {{"routed_scaling_factor", nullptr}, {"n_group", nullptr}};
    EXPECT_TRUE(checkpoint::parse_model_config(sized(type, nulls).dump()).ok()) << type;
  }
  EXPECT_FALSE(first_layer(sized("olmoe", {{"norm_topk_prob", nullptr}})).routing.renormalize);
}

TEST(FamilyTypes, OfTransformers524) {
  const MoeLayerSpec sarvam = first_layer(sized("sarvam_moe", {{"score_function", "sigmoid"}}));
  EXPECT_EQ(sarvam.layer, 1);
  EXPECT_EQ(sarvam.routing.method, RoutingMethod::kTopK);
  EXPECT_EQ(sarvam.routing.scoring_func, ScoringFunc::kSigmoid);
  EXPECT_EQ(sarvam.routing.routed_scaling_factor, 2.5);
  EXPECT_TRUE(sarvam.routing.renormalize && sarvam.routing.has_correction_bias);
  EXPECT_EQ(sarvam.shared.intermediate_size, 8);
  EXPECT_EQ(checkpoint::find_family("sarvam_mla"), checkpoint::find_family("sarvam_moe"));
  EXPECT_EQ(checkpoint::find_family("hy_v4_vl_text"), checkpoint::find_family("hy_v4"));
  EXPECT_EQ(checkpoint::find_family("inkling2_loop_text"),
            checkpoint::find_family("inkling2_text"));

  const Json lara = sized("lara_mini", {{"shared_expert_intermediate_size", 24}});
  EXPECT_EQ(layers_of(lara), (std::vector<int>{0, 1, 2, 3}));
  const MoeLayerSpec spec = first_layer(lara);
  EXPECT_EQ(spec.routing.scoring_func, ScoringFunc::kSoftmax);
  EXPECT_TRUE(spec.routing.renormalize);
  EXPECT_FALSE(first_layer(with(lara, {{"norm_topk_prob", false}})).routing.renormalize);
  EXPECT_EQ(spec.shared.intermediate_size, 24);
  EXPECT_FALSE(spec.shared.gated_output);
}

}  // namespace
}  // namespace moesaic::test
