// What the methods' descriptions say of formats: packings, algorithms, overrides of modules.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/config/quant_config.h"
#include "checkpoint/container_support.h"
#include "checkpoint/quant_descriptions.h"

namespace moesaic::test {
namespace {

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
