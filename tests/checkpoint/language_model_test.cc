// Which part of config.json is the language model, and what its type is where it does not say.
#include "checkpoint/config/language_model.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/config/families.h"
#include "checkpoint/config/refused_families.h"
#include "checkpoint/config_support.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

TEST(Wrappers, LeadToTypesThatAreKnown) {
  std::set<std::string_view> types;
  for (const checkpoint::Wrapper& wrapper : checkpoint::wrappers()) {
    EXPECT_TRUE(types.insert(wrapper.type).second) << wrapper.type;
  }
  for (const checkpoint::Wrapper& wrapper : checkpoint::wrappers()) {
    EXPECT_TRUE(checkpoint::find_family(wrapper.inner) != nullptr ||
                checkpoint::find_refused_family(wrapper.inner) != nullptr ||
                types.contains(wrapper.inner))
        << wrapper.inner;
    EXPECT_EQ(checkpoint::find_family(wrapper.type), nullptr);
  }
}

TEST(Wrappers, SayWhatTheirLanguageModelIs) {
  const auto type_of = [](const Json& json) {
    const auto model = checkpoint::find_language_model(json);
    EXPECT_TRUE(model.ok()) << model.status().to_string();
    return model.ok() ? model->model_type : "";
  };
  for (const checkpoint::Wrapper& wrapper : checkpoint::wrappers()) {
    if (wrapper.type == "qwen3_omni_moe") continue;
    EXPECT_EQ(type_of({{"model_type", wrapper.type}, {"text_config", Json::object()}}),
              wrapper.inner);
    EXPECT_EQ(type_of({{"model_type", wrapper.type}, {"text_config", {{"model_type", "x"}}}}), "x")
        << "what is stated counts";
  }
  EXPECT_EQ(type_of({{"model_type", "qwen3_omni_moe"},
                     {"thinker_config", {{"text_config", Json::object()}}}}),
            "qwen3_omni_moe_text");
  EXPECT_EQ(type_of({{"model_type", "some_vl"}, {"text_config", Json::object()}}), "");
  EXPECT_EQ(type_of({{"text_config", {{"model_type", "x"}}}}), "x");
  EXPECT_EQ(mismatch(checkpoint::find_language_model({{"model_type", 3}}).status(),
                     StatusCode::kCorruptFile, {"config.json: model_type", "a string"}),
            "");
  const Json text = without(small("", {{"shared_intermediate_size", 8}}), {"model_type"});
  EXPECT_EQ(parse({{"model_type", "minimax_m3_vl"}, {"text_config", text}}).model_type,
            "minimax_m3_vl_text");
}

// Published files with the language model's fields at the top.
TEST(Wrappers, MayBeFlat) {
  const Json dots = small("dots3_note", {{"moe_intermediate_size", 8},
                                         {"topk_method", "noaux_tc"},
                                         {"vision_config", {{"hidden_size", 3}}}});
  EXPECT_EQ(parse(dots).model_type, "dots3_note_text");
  EXPECT_EQ(layers_of(dots), (std::vector<int>{1, 2, 3}));
  const Json glm = small("glm5_next", {{"moe_intermediate_size", 8}});
  EXPECT_EQ(parse(glm).model_type, "glm5_next_text");
  EXPECT_EQ(layers_of(glm), (std::vector<int>{3}));
  EXPECT_EQ(
      mismatch(checkpoint::parse_model_config(small("qwen4_exp", Json::object()).dump()).status(),
               StatusCode::kUnsupported, {"model_type", "qwen4_exp", "not supported"}),
      "");
}

// Its own files have another name for the object and for the type.
TEST(Wrappers, UnlimitedOcr) {
  const Json inner = small("deepseek_v2", {{"moe_intermediate_size", 8}, {"n_shared_experts", 2}});
  for (const char* type : {"unlimited_ocr", "unlimited-ocr"}) {
    for (const Json& text : {inner, without(inner, {"model_type"})}) {
      const Json json = {{"model_type", type}, {"language_config", text}};
      EXPECT_EQ(parse(json).model_type, "unlimited_ocr_text");
      EXPECT_EQ(layers_of(json), (std::vector<int>{1, 2, 3}));
    }
  }
  // Only there: elsewhere nobody says what such an object is.
  EXPECT_FALSE(checkpoint::parse_model_config(
                   Json{{"model_type", "some_vl"}, {"language_config", inner}}.dump())
                   .ok());
}

}  // namespace
}  // namespace moesaic::test
