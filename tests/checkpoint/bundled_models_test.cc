// The trained checkpoints: bundled ones always, larger ones where they are found.
#include <cstdlib>
#include <filesystem>
#include <set>

#include "checkpoint/tiny_support.h"
#include "numerics/element.h"
#include "support/source_folder.h"

namespace moesaic::test {
namespace {

struct Model {
  std::string folder;
  std::vector<int> layers;
  std::int64_t num_experts, top_k, intermediate_size;
  std::string routing, quant;
};

// Every layer must load whole, without a problem reported.
void expect_loads(const std::string& directory, const Model& m) {
  SCOPED_TRACE(m.folder);
  const Checkpoint checkpoint = must_open(directory);
  EXPECT_EQ(checkpoint.problems(), std::vector<std::string>());
  std::vector<int> layers;
  for (const MoeLayerSpec& spec : checkpoint.layers()) {
    layers.push_back(spec.layer);
    EXPECT_EQ(spec.num_experts, m.num_experts);
    EXPECT_EQ(spec.routing.top_k, m.top_k);
    EXPECT_EQ(spec.hidden_size, 256);
    EXPECT_EQ(spec.intermediate_size, m.intermediate_size);
    EXPECT_EQ(routing_method_name(spec.routing.method), m.routing);
    EXPECT_EQ(spec.quant.name, m.quant);
    std::int64_t done = 0;
    std::int64_t total = 1;
    Result<MoeLayerWeights> loaded =
        checkpoint.load_layer(spec.layer, {}, [&](std::int64_t d, std::int64_t t) {
          done = d;
          total = t;
        });
    ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
    for (std::int64_t e = 0; e < spec.num_experts; ++e) {
      const auto got = loaded->experts->expert(e);
      ASSERT_TRUE(got.ok()) << got.status().to_string();
      EXPECT_EQ(got->w13.shape.to_string(),
                (Shape{2 * spec.intermediate_size, spec.hidden_size}).to_string());
    }
    EXPECT_EQ(done, total);
  }
  EXPECT_EQ(layers, m.layers);
}

TEST(BundledModels, LoadWhole) {
  for (const Model& m :
       std::vector<Model>{{"mini-qwen3-moe", {1}, 16, 4, 128, "topk", "bf16"},
                          {"mini-deepseek-v3", {1}, 16, 4, 128, "grouped_topk", "bf16"},
                          {"mini-gpt-oss", {0}, 8, 2, 256, "topk_softmax", "bf16"}}) {
    expect_loads(test::bundled_model(m.folder), m);
  }
}

// gpt-oss has I == H here, so that no shape check can notice a forgotten transpose.
TEST(BundledModels, GptOssIsTransposedAndDeinterleaved) {
  const Checkpoint c = must_open(test::bundled_model("mini-gpt-oss"));
  auto loaded = c.load_layer(0, {});
  ASSERT_TRUE(loaded.ok());
  const Tensor gate_up = c.read_tensor("model.layers.0.mlp.experts.gate_up_proj").value();
  const Tensor down = c.read_tensor("model.layers.0.mlp.experts.down_proj").value();
  const Tensor bias = c.read_tensor("model.layers.0.mlp.experts.gate_up_proj_bias").value();
  const std::int64_t n = 256;
  for (const std::int64_t e : {0, 5, 7}) {
    const ExpertWeightsView view = loaded->experts->expert(e).value();
    std::int64_t wrong = 0;
    for (std::int64_t j = 0; j < n; ++j) {
      for (std::int64_t h = 0; h < n; ++h) {
        const auto* row = gate_up.as<std::uint16_t>() + (e * n + h) * 2 * n;
        wrong += view.w13.as<std::uint16_t>()[j * n + h] != row[2 * j];
        wrong += view.w13.as<std::uint16_t>()[(n + j) * n + h] != row[2 * j + 1];
        wrong +=
            view.w2.as<std::uint16_t>()[h * n + j] != down.as<std::uint16_t>()[(e * n + j) * n + h];
      }
      wrong +=
          view.w13_bias.as<float>()[j] != load_as_f32(bias.data(), bias.dtype(), e * 2 * n + 2 * j);
      wrong += view.w13_bias.as<float>()[n + j] !=
               load_as_f32(bias.data(), bias.dtype(), e * 2 * n + 2 * j + 1);
    }
    EXPECT_EQ(wrong, 0) << "expert " << e;
  }
}

std::string extra_models() {
  const std::string folder = test::extra_model("");
  return std::filesystem::is_directory(folder) ? folder : "";
}

TEST(ExtraModels, LoadWholeOrAreRefusedByName) {
  const std::string root = extra_models();
  if (root.empty()) GTEST_SKIP() << "no larger models: set MOESAIC_EXTRA_MODELS to their folder";
  for (const Model& m : std::vector<Model>{
           {"tiny-qwen3-moe", {0, 1}, 32, 4, 128, "topk", "bf16"},
           {"tiny-deepseek-v3", {1, 2}, 32, 4, 128, "grouped_topk", "bf16"},
           {"tiny-gpt-oss", {0, 1}, 16, 4, 256, "topk_softmax", "bf16"},
           {"tiny-deepseek-v3-fp8", {1, 2}, 32, 4, 128, "grouped_topk", "fp8-block"},
           {"tiny-gpt-oss-mxfp4", {0, 1}, 16, 4, 256, "topk_softmax", "mxfp4-bf16"}}) {
    if (std::filesystem::is_directory(root + "/" + m.folder))
      expect_loads(root + "/" + m.folder, m);
  }
}

}  // namespace
}  // namespace moesaic::test
