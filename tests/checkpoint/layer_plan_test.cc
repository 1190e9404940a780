// The tensors that a layer of a known model must have.
#include "checkpoint/binding/layer_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/config_support.h"

namespace moesaic::test {
namespace {

// Released sizes: the shapes that a real checkpoint has.
TEST(LayerPlan, ReleasedShapes) {
  Json json = deepseek_v3();
  json["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const checkpoint::ModelConfig config = parse(json);
  checkpoint::LayerSource source;
  ASSERT_FALSE(config.layers.empty());
  source.spec = config.layers[0];
  source.family = config.family;
  source.layout = &config.family->layouts[0];
  source.shared_layout = &config.family->shared_layout;
  source.weight_suffix = source.layout->weight_suffixes.list()[0];
  source.gate_weight = config.family->gate_weight;
  source.correction_bias = config.family->correction_bias.list()[0];
  source.experts.stored = source.shared.stored = checkpoint::StoredFormat::kFp8Block;
  source.experts_dtype = source.shared_dtype = DType::kF8E4M3;
  const std::vector<checkpoint::PlannedTensor> plan = checkpoint::plan_layer(source);
  EXPECT_EQ(plan.size(), 2U + 6U + 256U * 6U);
  std::map<std::string, std::string> shapes;
  for (const checkpoint::PlannedTensor& t : plan) shapes[t.name] = t.shape.to_string();
  EXPECT_EQ(shapes.size(), plan.size()) << "names are distinct";
  const std::string p = "model.layers.3.mlp.";
  EXPECT_EQ(shapes[p + "gate.weight"], "[256, 7168]");
  EXPECT_EQ(shapes[p + "gate.e_score_correction_bias"], "[256]");
  EXPECT_EQ(shapes[p + "experts.255.gate_proj.weight"], "[2048, 7168]");
  EXPECT_EQ(shapes[p + "experts.255.gate_proj.weight_scale_inv"], "[16, 56]");
  EXPECT_EQ(shapes[p + "experts.0.down_proj.weight_scale_inv"], "[56, 16]");
  EXPECT_EQ(shapes[p + "shared_experts.up_proj.weight"], "[2048, 7168]");
}

// DeepSeek-V4's released names: scales beside their weights, tables of token ids.
TEST(LayerPlan, DeepSeekV4) {
  Json json = with(v4(), {{"hidden_size", 256}, {"moe_intermediate_size", 128}});
  json["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const checkpoint::ModelConfig config = parse(json);
  ASSERT_EQ(config.layers.size(), 4U);
  checkpoint::LayerSource source;
  source.family = config.family;
  source.layout = &config.family->layouts[0];
  source.shared_layout = &config.family->shared_layout;
  source.weight_suffix = ".weight";
  source.correction_bias = config.family->correction_bias.list()[0];
  source.experts.stored = source.shared.stored = checkpoint::StoredFormat::kFp8Block;
  source.experts_dtype = source.shared_dtype = DType::kF8E4M3;
  const auto shapes_of = [&](std::size_t layer) {
    source.spec = config.layers[layer];
    std::map<std::string, std::string> shapes;
    for (const checkpoint::PlannedTensor& t : checkpoint::plan_layer(source))
      shapes[t.name] = t.shape.to_string();
    return shapes;
  };
  auto hashed = shapes_of(2);
  EXPECT_EQ(hashed.size(), 2U + 6U + 4U * 6U);
  EXPECT_EQ(hashed["model.layers.2.ffn.gate.tid2eid"], "[11, 2]");
  auto scored = shapes_of(3);
  EXPECT_EQ(scored.size(), 2U + 6U + 4U * 6U);
  EXPECT_EQ(scored["model.layers.3.ffn.gate.bias"], "[4]");
  EXPECT_EQ(scored["model.layers.3.ffn.experts.3.w2.scale"], "[2, 1]");
  EXPECT_EQ(scored["model.layers.3.ffn.shared_experts.w1.scale"], "[1, 2]");
}

}  // namespace
}  // namespace moesaic::test
