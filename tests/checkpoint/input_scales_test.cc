// Static activation scales of checkpoints: each expert's own, gate's and up's as one, what is said
// of those that were merged, and what becomes of scales that are asked for per batch.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "checkpoint/container_support.h"
#include "checkpoint/tiny_support.h"
#include "moesaic/fused_moe.h"
#include "moesaic/log.h"

namespace moesaic::test {
namespace {

constexpr std::int64_t kExperts = 3, kHidden = 32, kWidth = 16;

// Numbers of gate, up and down of each expert; 0: none is stored.
using Numbers = std::array<std::array<float, 3>, kExperts>;
constexpr Numbers kOwn = {{{0.5F, 0.5F, 0.25F}, {0.125F, 0.125F, 1.0F}, {0.75F, 0.75F, 0.5F}}};

constexpr const char* kFp8Static = R"({"quant_method": "fp8", "activation_scheme": "static"})";

std::string compressed(const char* strategy, bool dynamic) {
  return std::string(R"({"quant_method": "compressed-tensors", "format": "float-quantized",
    "ignore": ["re:.*gate$"], "config_groups": {"g": {"targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor"},
    "input_activations": {"num_bits": 8, "type": "float", "symmetric": true, "strategy": ")") +
         strategy + R"(", "dynamic": )" + (dynamic ? "true" : "false") + "}}}}";
}

// A layer of FP8 experts, one scale per tensor, codes of 1.
void write_model(const TempDir& folder, const std::string& quant, const Numbers& inputs) {
  write_bytes(folder.path("config.json"),
              R"({"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 16,
      "num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": true,
      "torch_dtype": "bfloat16", "quantization_config": )" +
                  quant + "}");
  std::vector<NamedTensor> list;
  const Tensor gate = Tensor::zeros(DType::kBF16, {kExperts, kHidden}).value();
  Tensor codes = Tensor::zeros(DType::kF8E4M3, {kWidth, kHidden}).value();
  std::fill_n(codes.as<std::uint8_t>(), codes.bytes(), std::uint8_t{0x38});
  const ConstTensorView down(codes.data(), DType::kF8E4M3, {kHidden, kWidth});
  Tensor scale = Tensor::zeros(DType::kF32, {1}).value();
  *scale.as<float>() = 0.0625F;
  list.push_back({"model.layers.0.mlp.gate.weight", gate.view()});
  std::vector<Tensor> kept;
  kept.reserve(3 * kExperts);
  for (std::size_t e = 0; e < kExperts; ++e) {
    std::size_t p = 0;
    for (const char* leaf : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string module =
          "model.layers.0.mlp.experts." + std::to_string(e) + "." + leaf + ".";
      list.push_back({module + "weight", p == 2 ? down : codes.view()});
      list.push_back({module + "weight_scale", scale.view()});
      const float input = inputs[e][p++];
      if (input == 0) continue;
      kept.push_back(Tensor::zeros(DType::kF32, {1}).value());
      *kept.back().as<float>() = input;
      list.push_back({module + "input_scale", kept.back().view()});
    }
  }
  ASSERT_EQ(write_safetensors(folder.path("model.safetensors"), list).message(), "");
}

// What the log sink got while the layer was loaded.
struct Loaded {
  std::vector<std::string> warnings;
  std::vector<float> w13, w2;
  std::string note;
};
Result<Loaded> load(const TempDir& folder, const Checkpoint::Options& options = {},
                    const ParallelConfig& parallel = {}) {
  Loaded loaded;
  set_log_sink([&](std::string_view text) { loaded.warnings.emplace_back(text); });
  const Checkpoint checkpoint = Checkpoint::open(folder.path(), options).value();
  Result<MoeLayerWeights> weights = checkpoint.load_layer(0, parallel);
  set_log_sink({});
  if (!weights.ok()) return weights.status();
  loaded.note = weights->spec.quant_note;
  for (std::int64_t e = 0; e < kExperts / parallel.ep_size; ++e) {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView v, weights->experts->expert(e));
    if (!v.w13_input_scale.present()) continue;
    loaded.w13.push_back(*v.w13_input_scale.as<float>());
    loaded.w2.push_back(*v.w2_input_scale.as<float>());
  }
  return loaded;
}

TEST(InputScales, AreEachExpertsOwnOnEveryRank) {
  const TempDir folder;
  write_model(folder, kFp8Static, kOwn);
  const Loaded all = load(folder).value();
  EXPECT_EQ(all.w13, (std::vector<float>{0.5F, 0.125F, 0.75F}));
  EXPECT_EQ(all.w2, (std::vector<float>{0.25F, 1.0F, 0.5F}));
  EXPECT_EQ(all.note, "");
  EXPECT_TRUE(all.warnings.empty());
  ParallelConfig last;
  last.ep_size = 3;
  last.ep_rank = 2;
  EXPECT_EQ(load(folder, {}, last)->w13, std::vector<float>{0.75F});
}

TEST(InputScales, TheLargestOfTheLayerOnRequest) {
  const TempDir folder;
  write_model(folder, kFp8Static, kOwn);
  Checkpoint::Options options;
  options.input_scales = InputScaleRule::kLargest;
  const Loaded all = load(folder, options).value();
  EXPECT_EQ(all.w13, std::vector<float>(3, 0.75F));
  EXPECT_EQ(all.w2, std::vector<float>(3, 1.0F));
  ParallelConfig first;
  first.ep_size = 3;
  EXPECT_EQ(load(folder, options, first)->w13, std::vector<float>{0.75F});
}

TEST(InputScales, OfGateAndUpTheLargerAndOneWarning) {
  const TempDir folder;
  Numbers differ = kOwn;
  differ[1] = {0.125F, 0.25F, 1.0F};
  differ[2] = {0.75F, 0.5F, 0.5F};
  write_model(folder, kFp8Static, differ);
  const Loaded all = load(folder).value();
  EXPECT_EQ(all.w13, (std::vector<float>{0.5F, 0.25F, 0.75F}));
  ASSERT_EQ(all.warnings.size(), 1U);
  for (const char* word : {"layer 0", "experts.1.gate_proj.input_scale", "2 of 3 experts",
                           "expert 1: 0.125 and 0.25", "the larger"}) {
    EXPECT_NE(all.warnings[0].find(word), std::string::npos) << all.warnings[0];
  }
  EXPECT_EQ(must_open(folder.path()).check_layer(0)->spec.quant_note, all.note);
  EXPECT_NE(all.note, "");
}

TEST(InputScales, OfCompressedTensorsMustAgree) {
  const TempDir folder;
  Numbers differ = kOwn;
  differ[1][1] = 0.125F * (1 + 8e-6F);
  write_model(folder, compressed("tensor", false), differ);
  EXPECT_EQ(load(folder)->w13[1], differ[1][1]);
  differ[1][1] = 0.125F * (1 - 2e-5F);
  write_model(folder, compressed("tensor", false), differ);
  EXPECT_EQ(mismatch(load(folder).status(), StatusCode::kCorruptFile,
                     {"experts.1.gate_proj.input_scale", "experts.1.up_proj.input_scale", "0.125",
                      "need the same"}),
            "");
  EXPECT_EQ(must_open(folder.path()).problems().size(), 1U);
}

// A scale of the whole batch would make a row's result depend on the rows beside it: one per token
// is computed, and said.
TEST(InputScales, AskedForPerBatchAreComputedPerTokenAndThatIsSaid) {
  const TempDir folder;
  write_model(folder, compressed("tensor", true), {});
  const Loaded all = load(folder).value();
  EXPECT_TRUE(all.w13.empty());
  ASSERT_EQ(all.warnings.size(), 1U);
  EXPECT_NE(all.warnings[0].find("one per token is computed"), std::string::npos);
  const Checkpoint checkpoint = must_open(folder.path());
  const MoeLayerFormat format = checkpoint.check_layer(0).value();
  EXPECT_EQ(format.spec.quant.activation.granularity, ScaleGranularity::kToken);
  const LayerExplanation explained = explain_layer(format, {}).value();
  EXPECT_EQ(explained.activations, "F8_E4M3, one scale per token");
  EXPECT_EQ(explained.quant_note, all.note);
  FusedMoE::Options f32;
  f32.quant = "f32";
  EXPECT_EQ(explain_layer(format, f32)->activations, "F32");
  EXPECT_EQ(explain_layer(format, f32)->quant_note, "");

  write_model(folder, compressed("token", true), {});
  EXPECT_TRUE(load(folder)->warnings.empty());
  write_model(folder, compressed("channel", true), {});
  EXPECT_EQ(mismatch(Checkpoint::open(folder.path()).status(), StatusCode::kUnsupported,
                     {"input_activations", "\"channel\"", "token or tensor"}),
            "");
}

}  // namespace
}  // namespace moesaic::test
