// Which modules a quantisation covers: the name rules of the methods, groups, experts as a whole.
#include "checkpoint/config/quant_config.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <nlohmann/json.hpp>

#include "checkpoint/config/module_patterns.h"
#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

using Json = nlohmann::json;

Result<checkpoint::QuantConfig> parse_quant(const Json& quant) {
  return checkpoint::parse_quant_config(Json({{"quantization_config", quant}}));
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
  // Python's names for both ends, and a backslash before such a letter.
  EXPECT_TRUE(matches(R"(.*mlp\.experts\..*\Z)", "model.mlp.experts.0.up_proj"));
  EXPECT_FALSE(matches(R"(\Amodel\.mlp\Z)", "model.mlp.gate"));
  EXPECT_TRUE(matches(R"((\Amodel|x)\.mlp\Z)", "model.mlp"));
  EXPECT_FALSE(matches(R"(a\\Z)", "aZ"));
  EXPECT_TRUE(matches(R"(a\\Z)", R"(a\Z)"));
  EXPECT_TRUE(checkpoint::regex_hits(R"(.*gate\Z)", "mlp.gate"));
  EXPECT_TRUE(matches(R"(\w+\.\d\b\x2Egate)", "layers.3.gate"));
  for (const char letter : {'G', 'z', 'K', 'c', 'p', 'N', 'E', 'a'}) {
    const std::string pattern = std::string("mlp\\") + letter;
    EXPECT_EQ(mismatch(checkpoint::regex_matches("f", pattern, "mlp").status(),
                       StatusCode::kUnsupported, {"has the escape", pattern.substr(3)}),
              "");
    EXPECT_FALSE(checkpoint::regex_hits(pattern, std::string("mlp") + letter));
  }
  // Exponential for an engine that backtracks.
  EXPECT_FALSE(matches("(a|aa|aaa)*b", std::string(200, 'a')));
}

// Compiled, a count is as many copies: patterns come from untrusted files, and are kept.
// Python's syntax is what is written; what would be read as something else is refused.
TEST(ModulePatterns, AreReadAsPythonReadsThem) {
  const auto match = [](const char* pattern, const char* name) {
    const Result<bool> hit = checkpoint::regex_matches("targets", pattern, name);
    return hit.ok() ? (*hit ? "yes" : "no") : hit.status().to_string();
  };
  for (const auto& [pattern, name] :
       {std::pair{".*(?=gate).*", "mlp.gate"}, std::pair{"(?:a|b)*?c", "abc"},
        std::pair{"a+?b{1,2}?", "aab"}, std::pair{"[a\\]b[]+$", "a]b["},
        std::pair{"(?!lm_head)[\\w.-]+$", "a.b-c"}, std::pair{"[[a]b", "[b"}}) {
    EXPECT_EQ(match(pattern, name), "yes") << pattern;
  }
  for (const auto& [pattern, why] :
       {std::pair{"(?i).*MLP.*", "not supported"}, std::pair{"(?P<x>a)", "not supported"},
        std::pair{"(?<=a)b", "not supported"}, std::pair{".*[[:digit:]]", "[: in a set"},
        std::pair{"[]0-9]+", "begins with ]"}, std::pair{"[^]a]", "begins with ]"},
        std::pair{"a++a", "two counts"}, std::pair{"a{2}{2}", "two counts"},
        std::pair{"a??+", "two counts"}, std::pair{"\xc3\xa9+", "outside ASCII"},
        std::pair{"\\Gx", "the escape \\G"}}) {
    EXPECT_NE(match(pattern, "model.layers.1").find(why), std::string::npos)
        << pattern << ": " << match(pattern, "model.layers.1");
  }
}

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

// Without these texts a name is no match, and the expression need not be run.
TEST(ModulePatterns, TextsThatEveryMatchHas) {
  using Texts = std::vector<std::string>;
  for (const auto& [pattern, texts] : std::vector<std::pair<std::string, Texts>>{
           {R"(.*layers\.3\.self_attn.*)", {"layers.3.self_attn"}},
           {R"(model\.layers\.[0-9]+\.mlp$)", {"model.layers.", ".mlp"}},
           {R"(.*mlp\.(gate|up)_proj.*)", {"mlp.", "_proj"}},
           {"ab*c?d+e{2}f", {"a", "d", "f"}},
           {R"(\d+\.gate)", {".gate"}},
           {"a|b", {}},
           {R"(a\x41b)", {}},
           {R"([\]]a)", {}},
           {"(a))b", {}},
           {"", {}}}) {
    EXPECT_EQ(checkpoint::texts_of_regex(pattern), texts) << pattern;
  }
  for (const auto& [pattern, texts] :
       std::vector<std::pair<std::string, Texts>>{{"model.layers.3.*", {"model.layers.3."}},
                                                  {"*mlp?gate*", {"mlp", "gate"}},
                                                  {"a*b[0-9]c", {"a", "b"}},
                                                  {"a\\*b", {"a"}}}) {
    EXPECT_EQ(checkpoint::texts_of_glob(pattern), texts) << pattern;
  }
  for (const char* pattern :
       {".*", "model.*gate", R"(.*layers\.(1|2)\..*)", R"(.*experts\.1\d?\.up.*)", "x|.*gate",
        "(?!.*gate).*", R"([^.]*\.layers\.2.*)", R"(.*\.(gate|up)_proj$)", "model{1,2}.*s?[.]"}) {
    for (const char* name :
         {"model.layers.1.mlp.gate", "model.layers.12.mlp.experts.1.up_proj", "lm_head", "",
          "model.layers.2.mlp.experts.10.gate_proj", "language_model.layers.2.mlp"}) {
      EXPECT_EQ(checkpoint::regex_hits(pattern, name),
                checkpoint::regex_matches("f", pattern, name).value())
          << pattern << " of " << name;
    }
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

TEST(QuantConfigFormats, PackingHasTwoNames) {
  const auto gptq = [](const Json& more) {
    Json quant = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 32}, {"sym", false}};
    quant.update(more);
    return parse_quant(quant);
  };
  EXPECT_TRUE(gptq(Json::object())->linear.zeros_minus_one);
  EXPECT_FALSE(gptq({{"format", "gptq_v2"}})->linear.zeros_minus_one);
  EXPECT_FALSE(
      gptq({{"format", "gptq_v2"}, {"checkpoint_format", "gptq_v2"}})->linear.zeros_minus_one);
  EXPECT_EQ(mismatch(gptq({{"format", "gptq_v2"}, {"checkpoint_format", "gptq"}}).status(),
                     StatusCode::kAmbiguousFormat, {"checkpoint_format", "gptq_v2", "need one"}),
            "");
  EXPECT_EQ(mismatch(gptq({{"format", "marlin"}}).status(), StatusCode::kUnsupported,
                     {"\"marlin\"", "gptq_v2"}),
            "");
  // Steps in front of a linear that its words say nothing of.
  EXPECT_EQ(mismatch(gptq({{"rotation", "hadamard"}}).status(), StatusCode::kUnsupported,
                     {"rotation \"hadamard\""}),
            "");
  EXPECT_EQ(mismatch(gptq({{"activation", {{"mode", "w4a8"}}}}).status(), StatusCode::kUnsupported,
                     {"activation"}),
            "");
  const Json awq = {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 32}, {"format", "gemv"}};
  EXPECT_EQ(mismatch(parse_quant(awq).status(), StatusCode::kUnsupported, {"\"gemv\"", "gemm"}),
            "");
}

TEST(QuantConfigFormats, ModelOptHasItsFileInside) {
  const auto inside = [](const Json& quantization) {
    return parse_quant({{"quant_method", "modelopt"}, {"quantization", quantization}});
  };
  const auto quant = inside({{"quant_algo", "FP8"}, {"exclude_modules", {"lm_head"}}});
  EXPECT_EQ(quant->linear.stored, checkpoint::StoredFormat::kFp8Tensor);
  EXPECT_TRUE(checkpoint::skips_module(*quant, "lm_head"));
  EXPECT_EQ(mismatch(inside({{"quant_algo", "x"}}).status(), StatusCode::kUnsupported,
                     {"quantization_config: quantization: quant_algo", "\"x\""}),
            "");
}

// AutoRound packs as one of the two does; modules of 16 bits are left out, by a part of their names or
// an expression.
TEST(QuantConfigFormats, AutoRoundHasAPacking) {
  const auto rounded = [](const Json& more) {
    Json quant = {{"quant_method", "auto-round"}, {"bits", 4}, {"group_size", 32}, {"sym", false}};
    quant.update(more);
    return parse_quant(quant);
  };
  const Json awq = {{"packing_format", "auto_round:auto_awq"}};
  EXPECT_EQ(rounded(awq)->linear.stored, checkpoint::StoredFormat::kAwq);
  EXPECT_TRUE(rounded(awq)->linear.zero_points);
  Json symmetric = awq;
  symmetric["sym"] = true;
  EXPECT_FALSE(rounded(symmetric)->linear.zero_points);
  symmetric.erase("packing_format");
  EXPECT_EQ(rounded(symmetric)->linear.stored, checkpoint::StoredFormat::kGptq);
  Json extra = awq;
  extra["extra_config"] = {{"shared_expert\\.", {{"bits", 16}}},
                           {"model.layers.0.mlp.gate", {{"bits", 32}}},
                           {"layers.5.mlp.experts", {{"bits", 16}}},
                           {"layers.6.mlp.experts", {{"sym", true}}},
                           {"model.layers.1.mlp.up_proj", {{"bits", 8}}}};
  const auto quant = rounded(extra);
  EXPECT_TRUE(checkpoint::skips_module(*quant, "model.layers.3.mlp.shared_expert.up_proj"));
  EXPECT_TRUE(checkpoint::skips_module(*quant, "model.layers.0.mlp.gate"));
  for (const char* kept : {"model.layers.1.mlp.gate", "model.layers.0.mlp.shared_experts"})
    EXPECT_FALSE(checkpoint::skips_module(*quant, kept)) << kept;
  constexpr std::array<std::string_view, 2> kLeaves = {"up_proj", "down_proj"};
  const auto experts = [&](const char* module) {
    return checkpoint::experts_format(*quant, module, 4, kLeaves);
  };
  EXPECT_EQ(experts("model.layers.5.mlp.experts")->stored, checkpoint::StoredFormat::kPlain);
  EXPECT_EQ(experts("model.layers.4.mlp.experts")->stored, checkpoint::StoredFormat::kAwq);
  EXPECT_EQ(mismatch(experts("model.layers.6.mlp.experts").status(), StatusCode::kUnsupported,
                     {"extra_config", "\"sym\": got true, need false"}),
            "");
  EXPECT_TRUE(checkpoint::check_overrides(*quant, "model.layers.11.mlp.up_proj").ok());
  EXPECT_EQ(mismatch(checkpoint::check_overrides(*quant, "model.layers.1.mlp.up_proj"),
                     StatusCode::kUnsupported, {"extra_config", "got 8, need 4"}),
            "");
}

// AWQ files of GPTQModel have the rules of its GPTQ files.
TEST(QuantConfigFormats, AwqHasDynamicRulesToo) {
  const auto awq = [](const Json& more) {
    Json quant = {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 32}};
    quant.update(more);
    return parse_quant(quant);
  };
  const auto quant = awq({{"dynamic", {{"-:.*shared_expert.*", Json::object()}}}});
  EXPECT_TRUE(checkpoint::skips_module(*quant, "model.layers.0.mlp.shared_expert.up_proj"));
  EXPECT_FALSE(checkpoint::skips_module(*quant, "model.layers.0.mlp.experts.0.up_proj"));
  const auto other = awq({{"dynamic", {{"+:.*experts.*", {{"group_size", 64}}}}}});
  EXPECT_EQ(mismatch(checkpoint::check_overrides(*other, "model.layers.0.mlp.experts.0.up_proj"),
                     StatusCode::kUnsupported, {"dynamic", "group_size", "got 64, need 32"}),
            "");
  EXPECT_EQ(mismatch(awq({{"rotation", "hadamard"}}).status(), StatusCode::kUnsupported,
                     {"rotation \"hadamard\""}),
            "");
}

// Every entry is an expression to compile.
TEST(QuantConfigFormats, RulesAreCounted) {
  Json dynamic = Json::object();
  for (int i = 0; i <= 1 << 18; ++i) dynamic["+:m" + std::to_string(i)] = Json::object();
  EXPECT_EQ(mismatch(parse_quant({{"quant_method", "gptq"},
                                  {"bits", 4},
                                  {"group_size", 32},
                                  {"dynamic", std::move(dynamic)}})
                         .status(),
                     StatusCode::kLimitExceeded, {"dynamic", "262145", "262144"}),
            "");
}

// ModelOpt lists every module that is quantised, or the module of all experts, with its algorithm.
TEST(QuantConfigFormats, MixedPrecisionIsPerModule) {
  const std::string layers = "model.layers.";
  const auto parse = [&](Json listed) {
    return parse_quant({{"quant_method", "modelopt"},
                        {"quant_algo", "MIXED_PRECISION"},
                        {"ignore", {"mtp*", layers + "9"}},
                        {"quantized_layers", std::move(listed)}});
  };
  const Json nvfp4 = {{"quant_algo", "NVFP4"}, {"group_size", 16}}, fp8 = {{"quant_algo", "FP8"}};
  Json listed = {{layers + "0.mlp.experts", nvfp4},
                 {layers + "0.mlp.shared_expert.up_proj", fp8},
                 {layers + "9.mlp.experts", nvfp4}};
  for (int e = 0; e < 12; ++e) {
    for (const char* leaf : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string name = "mlp.experts." + std::to_string(e) + "." + leaf;
      listed[layers + "1." + name] = fp8;
      listed[layers + "2." + name] = e == 11 ? fp8 : nvfp4;
      if (e != 11) listed[layers + "3." + name] = nvfp4;
    }
  }
  const checkpoint::QuantConfig quant = parse(listed).value();
  const auto stored = [&](const std::string& module) {
    return checkpoint::module_format(quant, layers + module).stored;
  };
  using checkpoint::StoredFormat;
  EXPECT_EQ(stored("0.mlp.experts.7.up_proj"), StoredFormat::kNvfp4);
  EXPECT_EQ(stored("0.mlp.shared_expert.up_proj"), StoredFormat::kFp8Tensor);
  EXPECT_EQ(stored("0.mlp.shared_expert.up"), StoredFormat::kPlain);
  EXPECT_EQ(stored("0.mlp.experts_too.up_proj"), StoredFormat::kPlain);
  EXPECT_EQ(stored("9.mlp.experts.0.up_proj"), StoredFormat::kPlain);
  constexpr std::array<std::string_view, 3> kLeaves = {"gate_proj", "up_proj", "down_proj"};
  const auto experts = [&](int layer) {
    return checkpoint::experts_format(quant, layers + std::to_string(layer) + ".mlp.experts", 12,
                                      kLeaves);
  };
  EXPECT_EQ(experts(0)->stored, StoredFormat::kNvfp4);
  EXPECT_EQ(experts(1)->stored, StoredFormat::kFp8Tensor);
  EXPECT_EQ(experts(1)->activation, checkpoint::ActivationQuant::kStatic);
  for (const int layer : {2, 3}) {
    EXPECT_EQ(mismatch(experts(layer).status(), StatusCode::kUnsupported,
                       {"of the format nvfp4", "experts.11.gate_proj", "all or none"}),
              "");
  }
  EXPECT_EQ(experts(4)->stored, StoredFormat::kPlain);
  EXPECT_EQ(experts(9)->stored, StoredFormat::kPlain);
}

// Of several names that a module lies in the innermost counts, and an algorithm that is not read
// concerns the modules that it is listed for.
TEST(QuantConfigFormats, MixedPrecisionMayHaveOtherAlgorithmsElsewhere) {
  const auto parse = [](Json listed) {
    return parse_quant({{"quant_method", "modelopt"},
                        {"quant_algo", "MIXED_PRECISION"},
                        {"ignore", {"model.layers.4*"}},
                        {"quantized_layers", std::move(listed)}});
  };
  const auto algorithm = [](const char* name) { return Json{{"quant_algo", name}}; };
  const checkpoint::QuantConfig quant =
      parse({{"a.lm_head", algorithm("W4A8_AWQ")},
             {"model", algorithm("FP8")},
             {"model.layers.1.mlp.experts", algorithm("NVFP4")},
             {"model.layers.2.mlp", algorithm("INT4_AWQ")},
             {"model.layers.2.mlp.shared_expert", algorithm("FP8")},
             {"model.layers.3.mlp.experts.5", algorithm("W4A8_AWQ")},
             {"model.layers.4", algorithm("W4A8_AWQ")},
             {"model.visual", algorithm("W8A8_SQ")}})
          .value();
  constexpr std::array<std::string_view, 2> kLeaves = {"up_proj", "down_proj"};
  const auto experts = [&](int layer) {
    return checkpoint::experts_format(
        quant, "model.layers." + std::to_string(layer) + ".mlp.experts", 8, kLeaves);
  };
  using checkpoint::StoredFormat;
  EXPECT_EQ(quant.linear.stored, StoredFormat::kFp8Tensor);
  EXPECT_EQ(experts(0)->stored, StoredFormat::kFp8Tensor);
  EXPECT_EQ(experts(1)->stored, StoredFormat::kNvfp4);
  EXPECT_EQ(mismatch(experts(2).status(), StatusCode::kUnsupported,
                     {"layers.2.mlp.experts.0.up_proj", "INT4_AWQ", "need FP8"}),
            "");
  EXPECT_EQ(mismatch(experts(3).status(), StatusCode::kUnsupported,
                     {"layers.3.mlp.experts.5.up_proj", "W4A8_AWQ"}),
            "");
  EXPECT_EQ(experts(4)->stored, StoredFormat::kPlain);
  const auto linear = [&](const char* name) {
    return checkpoint::check_overrides(quant, std::string("model.layers.") + name);
  };
  EXPECT_TRUE(linear("2.mlp.shared_expert.up_proj").ok());
  EXPECT_TRUE(linear("4.mlp.up_proj").ok());
  EXPECT_EQ(mismatch(linear("2.mlp.shared.up_proj"), StatusCode::kUnsupported, {"INT4_AWQ"}), "");
  // With nothing else, too.
  const auto alone = parse({{"lm_head", algorithm("W4A8_AWQ")}});
  EXPECT_TRUE(checkpoint::experts_format(*alone, "model.layers.0.mlp.experts", 8, kLeaves).ok());
  Json many = Json::object();
  for (int i = 0; i < 65; ++i) many[std::to_string(i)] = algorithm(std::to_string(i).c_str());
  EXPECT_EQ(mismatch(parse(many).status(), StatusCode::kLimitExceeded, {"64", "algorithms"}), "");
}

TEST(QuantConfigFormats, LayersHaveAsManyExperts) {
  const auto sparse = [](const Json& method, const Json& counts) {
    Json quant = compressed({{"a", group({"Linear"}, 4)}}, Json::array());
    quant["moe_sparsity_config"] = {{"method", method}, {"num_experts", counts}};
    return parse_quant(quant).status();
  };
  EXPECT_TRUE(sparse("prune", {nullptr, 96, 96}).ok());
  EXPECT_EQ(mismatch(sparse("prune", {nullptr, 96, 95}), StatusCode::kUnsupported,
                     {"moe_sparsity_config", "96 and 95", "all layers"}),
            "");
  EXPECT_EQ(mismatch(sparse("novice", {96, 96}), StatusCode::kUnsupported, {"\"novice\""}), "");
  EXPECT_EQ(mismatch(sparse("prune", 96), StatusCode::kCorruptFile, {"num_experts", "list"}), "");
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
