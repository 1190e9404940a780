// Which modules a quantisation covers: the name rules of the methods, groups, experts as a whole.
#include "checkpoint/config/quant_config.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/container_support.h"
#include "checkpoint/quant_descriptions.h"

namespace moesaic::test {
namespace {

// ModelOpt marks names while it renames modules and may leave the mark behind.
TEST(QuantConfigNames, ModelOptNamesEndAtANul) {
  using namespace std::string_literals;
  const checkpoint::QuantConfig quant =
      parse_quant({{"quant_method", "modelopt"},
                   {"quant_algo", "FP8"},
                   {"ignore",
                    {"model.layers.0.mlp.shared_experts\0mark*"s, "model.layers.1.mlp.gate.\0mark"s,
                     "model.layers.2.mlp\0mark.*"s, "lm_head"}}})
          .value();
  EXPECT_TRUE(checkpoint::skips_module(quant, "model.layers.0.mlp.shared_experts.gate_proj"));
  EXPECT_TRUE(checkpoint::skips_module(quant, "model.layers.1.mlp.gate"));
  EXPECT_FALSE(checkpoint::skips_module(quant, "model.layers.1.mlp.gate_proj"));
  EXPECT_TRUE(checkpoint::skips_module(quant, "model.layers.2.mlp.up_proj"));
  EXPECT_FALSE(checkpoint::skips_module(quant, "model.layers.3.mlp.up_proj"));
  EXPECT_TRUE(checkpoint::skips_module(quant, "lm_head"));
}

TEST(QuantConfigNames, GroupsAndIgnoreOfCompressedTensors) {
  const checkpoint::QuantConfig quant =
      parse_quant(
          compressed({{"a", group({"re:.*down_proj$"}, 8)},
                      {"b", group({"Linear"}, 4)},
                      {"c", group({"model.layers.0.mlp.experts.0.down_proj"}, 8,
                                  {{"weights", {{"num_bits", 8}, {"strategy", "channel"}}}})}},
                     {"lm_head", "re:.*mlp\\.gate$", "model.layers.0.self_attn.q_proj"}))
          .value();
  const auto bits = [&](std::string_view module) {
    return checkpoint::module_format(quant, module).bits;
  };
  EXPECT_EQ(bits("model.layers.0.mlp.experts.1.up_proj"), 4);
  EXPECT_EQ(bits("model.layers.0.mlp.experts.1.down_proj"), 8);
  EXPECT_EQ(checkpoint::module_format(quant, "model.layers.0.mlp.experts.1.down_proj").group_size,
            32);
  // An exact name goes before a pattern, a pattern before the class.
  EXPECT_EQ(checkpoint::module_format(quant, "model.layers.0.mlp.experts.0.down_proj").group_size,
            -1);
  for (const char* plain :
       {"lm_head", "model.layers.3.mlp.gate", "model.layers.0.self_attn.q_proj"}) {
    EXPECT_EQ(checkpoint::module_format(quant, plain).stored, checkpoint::StoredFormat::kPlain)
        << plain;
  }
  EXPECT_EQ(bits("model.layers.1.self_attn.q_proj"), 4);
  EXPECT_EQ(bits("model.lm_head"), 4);  // exact means exact
  constexpr std::array<std::string_view, 3> kLeaves = {"gate_proj", "up_proj", "down_proj"};
  EXPECT_EQ(
      mismatch(checkpoint::experts_format(quant, "model.layers.1.mlp.experts", 4, kLeaves).status(),
               StatusCode::kUnsupported, {"format", "down_proj", "gate_proj", "all or none"}),
      "");
}

TEST(QuantConfigNames, OfSeveralPatternsTheAlphabeticallyFirstCounts) {
  const auto of = [](const Json& a, const Json& b) {
    return parse_quant(compressed({{"a", group(a, 4)}, {"b", group(b, 8)}}, Json::array()));
  };
  const auto bits = [&](const Json& a, const Json& b) {
    return checkpoint::module_format(*of(a, b), "model.layers.0.mlp.experts.0.up_proj").bits;
  };
  EXPECT_EQ(bits({"re:.*mlp.*"}, {"re:.*experts.*"}), 8);
  EXPECT_EQ(bits({"re:.*experts.*"}, {"re:.*mlp.*"}), 4);
  EXPECT_EQ(bits({"Linear", "re:.*x"}, {"re:.*gate", "re:.*up_proj"}), 8);
  EXPECT_EQ(mismatch(of({"Linear"}, {"re:.*gate", "Linear"}).status(), StatusCode::kAmbiguousFormat,
                     {"\"a\" and \"b\"", "\"Linear\"", "differ"}),
            "");
  const Json twice = {{"a", group({"Linear"}, 4)}, {"b", group({"Linear"}, 4)}};
  EXPECT_TRUE(parse_quant(compressed(twice, Json::array())).ok());
}

TEST(QuantConfigNames, ExpertsAreOneFormatOrNone) {
  constexpr std::array<std::string_view, 3> kLeaves = {"gate_proj", "up_proj", "down_proj"};
  const auto format = [&](const Json& ignore) {
    const checkpoint::QuantConfig quant =
        parse_quant(compressed({{"b", group({"Linear"}, 4)}}, ignore)).value();
    return checkpoint::experts_format(quant, "model.layers.3.mlp.experts", 128, kLeaves);
  };
  EXPECT_EQ(format(Json::array())->stored, checkpoint::StoredFormat::kPacked);
  EXPECT_EQ(format({"re:.*experts.*"})->stored, checkpoint::StoredFormat::kPlain);
  EXPECT_EQ(format({"re:model\\.layers\\.3\\..*"})->stored, checkpoint::StoredFormat::kPlain);
  EXPECT_EQ(format({"re:model\\.layers\\.4\\..*"})->stored, checkpoint::StoredFormat::kPacked);
  for (const char* part : {"re:.*experts\\.77\\..*", "re:.*experts\\..\\.up.*", "re:.*up_proj",
                           "model.layers.3.mlp.experts.127.down_proj"}) {
    EXPECT_EQ(mismatch(format({part}).status(), StatusCode::kUnsupported,
                       {"left out", "experts", "all or none"}),
              "")
        << part;
  }
}

TEST(QuantConfigNames, ModelOptTakesShellPatternsAndPrefixes) {
  const checkpoint::QuantConfig quant =
      parse_quant({{"quant_method", "modelopt"},
                   {"quant_algo", "NVFP4"},
                   {"ignore", {"lm_head", "*.mlp.gate", "model.layers.0", "model.layers.[12].*"}}})
          .value();
  for (const char* skipped : {"lm_head", "model.layers.9.mlp.gate",
                              "model.layers.0.mlp.experts.0.up", "model.layers.2.x"}) {
    EXPECT_TRUE(checkpoint::skips_module(quant, skipped)) << skipped;
  }
  for (const char* kept : {"model.layers.9.mlp.gate_proj", "model.layers.01.x", "model.layers.10.x",
                           "model.lm_head"}) {
    EXPECT_FALSE(checkpoint::skips_module(quant, kept)) << kept;
  }
}

// Lists of substrings have dots at the ends: AWQ's "model.layers.0." is not layer 01.
TEST(QuantConfigNames, DotsAtTheEndsOfPartsSayNothing) {
  constexpr std::array<std::string_view, 3> kLeaves = {"gate_proj", "up_proj", "down_proj"};
  const Json awq = {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 32}};
  const Json bnb = {{"quant_method", "bitsandbytes"}, {"load_in_8bit", true}};
  const auto quant = [](Json json, const char* list, const Json& entries) {
    json[list] = entries;
    return parse_quant(json);
  };
  const Json entries = {"model.layers.0.", ".mlp.gate.", ".mtp"};
  for (const auto& listed :
       {quant(awq, "modules_to_not_convert", entries), quant(bnb, "llm_int8_skip_modules", entries),
        quant({{"quant_method", "fp8"}}, "ignored_layers", entries),
        quant({{"quant_method", "mxfp4"}}, "modules_to_not_convert", entries)}) {
    ASSERT_TRUE(listed.ok()) << listed.status().to_string();
    EXPECT_TRUE(checkpoint::skips_module(*listed, "model.layers.0.mlp.experts.1.up_proj"));
    EXPECT_TRUE(
        checkpoint::skips_experts(*listed, "model.layers.0.mlp.experts", 2, kLeaves).value());
    EXPECT_TRUE(checkpoint::skips_module(*listed, "model.layers.7.mlp.gate"));
    EXPECT_TRUE(checkpoint::skips_module(*listed, "model.mtp.up_proj"));
    for (const char* kept : {"model.layers.1.mlp.up_proj", "model.layers.01.mlp.up_proj",
                             "model.layers.7.mlp.gate_proj"}) {
      EXPECT_FALSE(checkpoint::skips_module(*listed, kept)) << kept;
    }
  }
  const Json each = {"experts.0.", ".experts.1.gate_proj", "experts.1.up_proj.",
                     ".experts.1.down_proj."};
  EXPECT_TRUE(checkpoint::skips_experts(quant(awq, "modules_to_not_convert", each).value(),
                                        "model.layers.0.mlp.experts", 2, kLeaves)
                  .value());
  EXPECT_EQ(mismatch(quant(awq, "modules_to_not_convert", {"lm_head", ".."}).status(),
                     StatusCode::kInvalidArgument, {"modules_to_not_convert", "got \"..\""}),
            "");
}

constexpr std::array<std::string_view, 3> kProjections = {"gate_proj", "up_proj", "down_proj"};
std::string experts_of(int layer) {
  return "model.layers." + std::to_string(layer) + ".mlp.experts";
}

// Whatever entries are set aside because they cannot match, the answer is that of every name by itself.
TEST(QuantConfigExperts, AreWhatTheirNamesAre) {
  const std::vector<std::string> entries = {
      "lm_head",
      R"(re:.*layers\.1\..*)",
      R"(re:.*layers\.11\.self_attn.*)",
      R"(re:.*experts\.1\..*)",
      R"(re:.*experts\.\d\..*)",
      R"(re:.*\.11\.down_proj)",
      R"(re:.*s\.1[0-9]*\.(gate|up|down)_proj)",
      R"(re:.*\.1\.mlp\.experts\.[0-9]+\.gate.*)",
      R"(re:model\.layers\.(1|2)\.mlp.*)",
      "model.layers.1.mlp.experts.11.up_proj",
      "re:.*",
  };
  const int num_experts = 12;
  for (std::size_t a = 0; a < entries.size(); ++a) {
    for (std::size_t b = a; b < entries.size(); ++b) {
      const checkpoint::QuantConfig quant =
          parse_quant(compressed({{"group_0", group({"Linear"}, 4)}}, {entries[a], entries[b]}))
              .value();
      for (const int layer : {1, 11}) {
        std::size_t skipped = 0;
        for (int e = 0; e < num_experts; ++e) {
          for (const std::string_view projection : kProjections) {
            const std::string name = experts_of(layer) + "." + std::to_string(e) + ".";
            skipped += checkpoint::skips_module(quant, name + std::string(projection)) ? 1 : 0;
          }
        }
        const auto got =
            checkpoint::skips_experts(quant, experts_of(layer), num_experts, kProjections);
        const bool whole = skipped == 0 || skipped == num_experts * kProjections.size();
        EXPECT_EQ(got.ok(), whole) << entries[a] << " " << entries[b] << " " << layer;
        if (got.ok()) {
          EXPECT_EQ(*got, skipped > 0) << entries[a] << " " << entries[b];
        }
      }
    }
  }
}

// A model of Kimi K2's size with a pattern for each layer's attention: nearly 3 million pairs of an
// expert's name and a pattern, of which none need to be looked at.
TEST(QuantConfigExperts, PatternsOfOtherModulesCostNothing) {
  Json ignore = {"lm_head"};
  for (int i = 0; i < 61; ++i)
    ignore.push_back("re:.*layers\\." + std::to_string(i) + "\\.self_attn.*");
  const checkpoint::QuantConfig quant =
      parse_quant(compressed({{"group_0", group({"Linear"}, 4)}}, ignore)).value();
  const auto begin = std::chrono::steady_clock::now();
  for (int layer = 1; layer < 61; ++layer) {
    const auto format = checkpoint::experts_format(quant, experts_of(layer), 384, kProjections, 60);
    ASSERT_TRUE(format.ok()) << format.status().to_string();
    EXPECT_EQ(format->stored, checkpoint::StoredFormat::kPacked);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(took.count(), 20.0);  // tenths of a second; it was two minutes
}

TEST(QuantConfigExperts, WorkIsBounded) {
  Json ignore = Json::array();
  for (int i = 0; i < 400; ++i)
    ignore.push_back("re:.*experts\\.[0-9]+\\.(x|" + std::to_string(i) + ")_proj");
  const checkpoint::QuantConfig few =
      parse_quant(compressed({{"group_0", group({"Linear"}, 4)}}, ignore)).value();
  EXPECT_TRUE(checkpoint::experts_format(few, experts_of(0), 2, kProjections, 4).ok());
  EXPECT_EQ(
      mismatch(checkpoint::experts_format(few, experts_of(0), 16384, kProjections, 4096).status(),
               StatusCode::kLimitExceeded,
               {"quantization_config", experts_of(0), "4096 layers", "4294967296"}),
      "");
  EXPECT_TRUE(checkpoint::check_match_steps(few, 61).ok());
  EXPECT_EQ(mismatch(checkpoint::check_match_steps(few, 4096), StatusCode::kLimitExceeded,
                     {"quantization_config", "4096 layers"}),
            "");
}

// In the top and in every object on the way to the language model.
TEST(QuantConfigHolders, AreThoseOfTheLanguageModel) {
  const Json text = {{"quantization_config", {{"quant_method", "gptq"}, {"bits", 5}}}};
  const auto refusal = [](const Json& top) {
    const auto model = checkpoint::find_language_model(top);
    return checkpoint::parse_quant_config(checkpoint::holders_of(top, model.value())).status();
  };
  EXPECT_EQ(
      mismatch(refusal({{"thinker_config", {{"text_config", text}}}}), StatusCode::kUnsupported,
               {"config.json: thinker_config: text_config: quantization_config: bits"}),
      "");
  Json between = text;
  between["text_config"] = Json::object();
  EXPECT_EQ(mismatch(refusal({{"thinker_config", between}}), StatusCode::kUnsupported,
                     {"config.json: thinker_config: quantization_config: bits"}),
            "");
  EXPECT_EQ(mismatch(refusal({{"model_type", "unlimited-ocr"}, {"language_config", text}}),
                     StatusCode::kUnsupported, {"config.json: language_config"}),
            "");
}

}  // namespace
}  // namespace moesaic::test
