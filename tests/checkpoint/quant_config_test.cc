// Which modules a quantisation covers: the name rules of the methods, groups, experts as a whole.
#include "checkpoint/config/quant_config.h"

#include <gtest/gtest.h>

#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/config/module_patterns.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

using Json = nlohmann::json;

Result<checkpoint::QuantConfig> parse_quant(const Json& quant) {
  return checkpoint::parse_quant_config({{"quantization_config", quant}}, nullptr);
}

Json group(const Json& targets, int bits, const Json& more = Json::object()) {
  Json made = {{"targets", targets},
               {"weights",
                {{"num_bits", bits}, {"type", "int"}, {"strategy", "group"}, {"group_size", 32}}}};
  made.update(more);
  return made;
}

Json compressed(const Json& groups, const Json& ignore) {
  return {{"quant_method", "compressed-tensors"},
          {"format", "pack-quantized"},
          {"config_groups", groups},
          {"ignore", ignore}};
}

TEST(ModulePatterns, RegularExpressionsMatchFromTheStartOnly) {
  const auto matches = [](const std::string& pattern, std::string_view name) {
    return checkpoint::regex_matches("f", pattern, name).value();
  };
  EXPECT_TRUE(matches("model.*gate", "model.layers.0.mlp.gate"));
  EXPECT_TRUE(matches("model", "model.layers"));  // not anchored at the end
  EXPECT_FALSE(matches("layers", "model.layers"));
  EXPECT_TRUE(matches(".*layers", "model.layers.0"));
  EXPECT_FALSE(matches(".*gate$", "model.mlp.gate_proj"));
  EXPECT_TRUE(matches(".*(q|k|v)_proj", "a.k_proj"));
  EXPECT_TRUE(matches(".*layers\\.(1|2)\\..*", "model.layers.2.mlp"));
  EXPECT_FALSE(matches(".*layers\\.(1|2)\\..*", "model.layers.12.mlp"));
  for (const char* bad : {"(", "[a", "*", "a{2,1}", "(a)\\1"}) {
    EXPECT_EQ(mismatch(checkpoint::regex_matches("f", bad, "a").status(), StatusCode::kUnsupported,
                       {"f: regular expression", bad == std::string("(a)\\1") ? "(a)" : bad}),
              "");
  }
  // Exponential for an engine that backtracks.
  EXPECT_FALSE(matches("(a|aa|aaa)*b", std::string(200, 'a')));
}

// Compiled, a count is as many copies: patterns come from untrusted files, and are kept.
TEST(ModulePatterns, WhatARegularExpressionBecomesIsBounded) {
  EXPECT_EQ(
      checkpoint::regex_matches("f", "model\\.layers\\.[0-9]{1,3}\\..*", "model.layers.12.mlp")
          .value(),
      true);
  for (const char* hostile :
       {"(a{999}){99}", "((((a{9}){9}){9}){9}){9}", "a{99999999999999999999}", "(a{50,}b){400}"}) {
    EXPECT_EQ(mismatch(checkpoint::regex_matches("f", hostile, "a").status(),
                       StatusCode::kUnsupported, {"f: regular expression", "repeats too much"}),
              "");
  }
}

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

TEST(QuantConfigFormats, SchemesFollowTheDescription) {
  const auto scheme = [](const Json& quant) {
    return checkpoint::linear_scheme(parse_quant(quant).value().linear, DType::kBF16).value();
  };
  const Json gptq = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 64}};
  EXPECT_EQ(scheme(gptq).weight.dtype, DType::kI4);
  EXPECT_EQ(scheme(gptq).weight.block_k, 64);
  EXPECT_TRUE(scheme(gptq).weight_only());
  Json other = gptq;
  other.update({{"sym", false}, {"desc_act", true}, {"bits", 8}});
  EXPECT_EQ(scheme(other).weight.dtype, DType::kU8);
  EXPECT_EQ(scheme(other).weight.zero_point, ZeroPoint::kInteger);
  EXPECT_TRUE(scheme(other).weight.act_order);
  const Scheme fixed = scheme({{"quant_method", "fp8"}, {"activation_scheme", "static"}});
  EXPECT_EQ(fixed.name, "fp8-tensor");
  EXPECT_EQ(fixed.activation.granularity, ScaleGranularity::kTensor);
  EXPECT_FALSE(fixed.activation.dynamic);
  const Scheme tables = scheme(
      {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}, {"bnb_4bit_quant_type", "fp4"}});
  EXPECT_EQ(tables.weight.table, CodeTable::kFp4);
}

}  // namespace
}  // namespace moesaic::test
