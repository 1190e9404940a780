// Which modules an AutoRound description concerns: its blocks, and entries of extra_config by whole names,
// parts of names and expressions. As AutoRound's own reader takes them.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <string_view>

#include "checkpoint/config/quant_config.h"
#include "checkpoint/quant_descriptions.h"
#include "support/refusal.h"

namespace moesaic::test {
namespace {

using checkpoint::StoredFormat;
constexpr std::array<std::string_view, 3> kProjections = {"gate_proj", "up_proj", "down_proj"};

Result<checkpoint::QuantConfig> rounded(const Json& more) {
  Json quant = {{"quant_method", "auto-round"}, {"bits", 4}, {"group_size", 32}, {"sym", true}};
  quant.update(more);
  return parse_quant(quant);
}

std::string experts_of(int layer, const std::string& root = "model") {
  return root + ".layers." + std::to_string(layer) + ".mlp.experts";
}

Result<checkpoint::LinearFormat> format(const checkpoint::QuantConfig& quant,
                                        const std::string& experts, int count = 2) {
  return checkpoint::experts_format(quant, experts, count, kProjections);
}

TEST(AutoRoundBlocks, WhatIsOutsideIsPlain) {
  for (const Json& blocks :
       {Json("model.layers.1, model.layers.3"), Json({"model.layers.1", "model.layers.3"}),
        Json({{"model.layers.1"}, {"model.layers.3"}})}) {
    const auto quant = rounded({{"block_name_to_quantize", blocks}}).value();
    for (const int inside : {1, 3, 10}) {
      EXPECT_EQ(format(quant, experts_of(inside))->stored, StoredFormat::kGptq) << inside;
    }
    for (const int outside : {0, 2, 4}) {
      EXPECT_EQ(format(quant, experts_of(outside))->stored, StoredFormat::kPlain) << outside;
    }
    EXPECT_TRUE(checkpoint::skips_module(quant, "model.layers.2.mlp.shared_expert.up_proj"));
    EXPECT_FALSE(checkpoint::skips_module(quant, "model.layers.3.mlp.shared_expert.up_proj"));
  }
  const auto early = rounded({{"to_quant_block_names", "visual.blocks"}}).value();
  EXPECT_EQ(format(early, experts_of(0))->stored, StoredFormat::kPlain);
  const auto none = rounded({{"block_name_to_quantize", nullptr}}).value();
  EXPECT_EQ(format(none, experts_of(0))->stored, StoredFormat::kGptq);
}

// The text model of a wrapper is called with and without it.
TEST(AutoRoundBlocks, NamesOfWrappersMayBeMissing) {
  const auto quant = rounded({{"block_name_to_quantize", "model.language_model.layers"}}).value();
  for (const char* root : {"model", "model.language_model", "language_model.model"}) {
    EXPECT_EQ(format(quant, experts_of(3, root))->stored, StoredFormat::kGptq) << root;
  }
  EXPECT_EQ(format(quant, experts_of(3, "visual"))->stored, StoredFormat::kPlain);
}

TEST(AutoRoundBlocks, AreNames) {
  const auto blocks = [](const Json& names) {
    return rounded({{"block_name_to_quantize", names}}).status();
  };
  expect_refusal(blocks(5), StatusCode::kCorruptFile, {"block_name_to_quantize", "got 5"});
  expect_refusal(blocks(""), StatusCode::kInvalidArgument, {"block_name_to_quantize", "\"\""});
  expect_refusal(blocks("a,,b"), StatusCode::kInvalidArgument, {"block_name_to_quantize"});
  expect_refusal(blocks(Json::array()), StatusCode::kInvalidArgument,
                 {"block_name_to_quantize", "[]"});
}

Json entries(const std::string& experts, int count, const Json& value) {
  Json all = Json::object();
  for (int e = 0; e < count; ++e) {
    for (const std::string_view projection : kProjections) {
      all[experts + "." + std::to_string(e) + "." + std::string(projection)] = value;
    }
  }
  return all;
}

// Before expressions, parts of names and blocks.
TEST(AutoRoundEntries, AWholeNameGoesFirst) {
  const Json four = {{"bits", 4}}, eight = {{"bits", 8}}, sixteen = {{"bits", 16}};
  Json extra = entries(experts_of(1), 2, four);
  extra.update(entries(experts_of(2), 2, sixteen));
  extra[".*layers\\.[12]\\.mlp\\.experts.*"] = eight;
  extra["mlp.experts"] = sixteen;
  for (const char* blocks : {"model.layers", "visual"}) {
    const auto quant =
        rounded({{"extra_config", extra}, {"block_name_to_quantize", blocks}}).value();
    EXPECT_EQ(format(quant, experts_of(1))->stored, StoredFormat::kGptq) << blocks;
    EXPECT_EQ(format(quant, experts_of(2))->stored, StoredFormat::kPlain) << blocks;
    EXPECT_EQ(format(quant, experts_of(3))->stored, StoredFormat::kPlain) << blocks;
    EXPECT_FALSE(checkpoint::skips_module(quant, experts_of(1) + ".0.up_proj"));
    EXPECT_TRUE(checkpoint::check_overrides(quant, experts_of(1) + ".0.up_proj").ok());
    // A third expert has what the others say of it, and they differ.
    expect_refusal(format(quant, experts_of(1), 3).status(), StatusCode::kAmbiguousFormat,
                   {"extra_config", "experts.2.gate_proj"});
  }
  extra = entries(experts_of(1), 2, eight);
  expect_refusal(format(rounded({{"extra_config", extra}}).value(), experts_of(1)).status(),
                 StatusCode::kUnsupported, {"extra_config", "\"bits\": got 8, need 4"});
}

// AutoRound quantises what an expression finds there alone; others take it as it says.
TEST(AutoRoundEntries, ExpressionsOutsideOfBlocksAreAmbiguous) {
  const auto quant = rounded({{"extra_config", {{".*experts.*", {{"bits", 4}}}}},
                              {"block_name_to_quantize", "visual"}})
                         .value();
  expect_refusal(format(quant, experts_of(0)).status(), StatusCode::kAmbiguousFormat,
                 {"extra_config", "block_name_to_quantize"});
}

// One for each projection is looked up, not tried on all the others.
TEST(AutoRoundEntries, WholeNamesCostNothing) {
  constexpr int kLayers = 60, kExperts = 256;
  Json extra = Json::object();
  for (int layer = 0; layer < kLayers; ++layer) {
    extra.update(entries(experts_of(layer), kExperts, {{"bits", layer == 3 ? 8 : 4}}));
  }
  const auto quant = rounded({{"extra_config", extra}}).value();
  ASSERT_EQ(quant.named.size(), kLayers * kExperts * kProjections.size());
  EXPECT_TRUE(checkpoint::check_match_steps(quant, kLayers).ok());
  const auto asked = [&](int layer) {
    return checkpoint::experts_format(quant, experts_of(layer), kExperts, kProjections, kLayers);
  };
  const auto read = asked(59);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->stored, StoredFormat::kGptq);
  expect_refusal(asked(3).status(), StatusCode::kUnsupported, {"\"bits\": got 8, need 4"});
}

}  // namespace
}  // namespace moesaic::test
