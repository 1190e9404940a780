// The loader's rules one by one: worked slicing example, divisibility, values that are refused.
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "checkpoint/config/linear_format.h"
#include "checkpoint/container_support.h"
#include "checkpoint/reader/fp8_checks.h"
#include "moesaic/checkpoint.h"
#include "quant/block_scales.h"
#include "quant/width_slice.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

// I = 4, H = 2: w1[i][j] = 10 i + j, w3 = 100 + 10 i + j, w2[h][i] = 200 + 10 h + i.
struct WorkedExample {
  WorkedExample() {
    const auto fill = [](Tensor* t, int rows, int cols, int base) {
      *t = Tensor::zeros(DType::kF32, {rows, cols}).value();
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < cols; ++c)
          t->as<float>()[r * cols + c] = static_cast<float>(base + 10 * r + c);
      }
    };
    fill(&w1, 4, 2, 0);
    fill(&w3, 4, 2, 100);
    fill(&w2, 2, 4, 200);
    fill(&gate, 1, 2, 300);
    const std::string p = "model.layers.0.block_sparse_moe.";
    const std::vector<NamedTensor> tensors = {{p + "experts.0.w1.weight", w1.view()},
                                              {p + "experts.0.w3.weight", w3.view()},
                                              {p + "experts.0.w2.weight", w2.view()},
                                              {p + "gate.weight", gate.view()}};
    EXPECT_TRUE(write_safetensors(dir.path("model.safetensors"), tensors).ok());
    const nlohmann::json config = {{"model_type", "mixtral"}, {"hidden_size", 2},
                                   {"intermediate_size", 4},  {"num_hidden_layers", 1},
                                   {"num_local_experts", 1},  {"num_experts_per_tok", 1}};
    write_bytes(dir.path("config.json"), config.dump());
  }
  TempDir dir;
  Tensor w1, w3, w2, gate;
};

std::vector<float> values(ConstTensorView view) {
  const auto* data = view.as<float>();
  return {data, data + view.shape.num_elements().value()};
}

TEST(Loader, WorkedExampleTwoRanks) {
  const WorkedExample example;
  const Result<Checkpoint> opened = Checkpoint::open(example.dir.path());
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  const Checkpoint& checkpoint = *opened;
  ParallelConfig parallel;
  parallel.tp_size = 2;
  auto rank0 = checkpoint.load_layer(0, parallel);
  ASSERT_TRUE(rank0.ok()) << rank0.status().to_string();
  EXPECT_EQ(rank0->spec.quant.name, "f32");
  const ExpertWeightsView a = rank0->experts->expert(0).value();
  EXPECT_EQ(values(a.w13), (std::vector<float>{0, 1, 10, 11, 100, 101, 110, 111}));
  EXPECT_EQ(values(a.w2), (std::vector<float>{200, 201, 210, 211}));
  parallel.tp_rank = 1;
  auto rank1 = checkpoint.load_layer(0, parallel);
  ASSERT_TRUE(rank1.ok());
  const ExpertWeightsView b = rank1->experts->expert(0).value();
  EXPECT_EQ(values(b.w13), (std::vector<float>{20, 21, 30, 31, 120, 121, 130, 131}));
  EXPECT_EQ(values(b.w2), (std::vector<float>{202, 203, 212, 213}));
}

TEST(Loader, SideFilesAndFoldersAreRefused) {
  const WorkedExample example;
  EXPECT_TRUE(Checkpoint::open(example.dir.path()).ok());
  write_bytes(example.dir.path("hf_quant_config.json"),
              R"({"quantization":{"quant_algo":"INT4_AWQ"}})");
  EXPECT_EQ(mismatch(Checkpoint::open(example.dir.path()).status(), StatusCode::kUnsupported,
                     {example.dir.path(), "hf_quant_config.json", "INT4_AWQ"}),
            "");
  EXPECT_EQ(mismatch(Checkpoint::open(example.dir.path("nowhere")).status(), StatusCode::kNotFound,
                     {"nowhere", "no such folder"}),
            "");
  EXPECT_EQ(mismatch(Checkpoint::open(example.dir.path("config.json")).status(),
                     StatusCode::kNotFound, {"config.json", "is not a folder"}),
            "");
  EXPECT_EQ(Checkpoint::open("").status().code(), StatusCode::kNotFound);
}

struct BlockCase {
  std::int64_t width, tp;
  bool ok;
};

TEST(Loader, Fp8BlockDivisibility) {
  for (const BlockCase& c : std::vector<BlockCase>{{2048, 16, true},
                                                   {2048, 32, false},
                                                   {1408, 1, true},
                                                   {1408, 2, false},
                                                   {768, 2, true},
                                                   {768, 4, false},
                                                   {1536, 4, true},
                                                   {1536, 8, false},
                                                   {64, 1, true}}) {
    const Status fp8 =
        quant::slice_width("intermediate_size", c.width, c.tp, 0, quant::kFp8BlockSize, false)
            .status();
    EXPECT_EQ(fp8.ok(), c.ok) << c.width << " tp " << c.tp;
    if (!c.ok) {
      EXPECT_EQ(mismatch(fp8, StatusCode::kInvalidArgument,
                         {"intermediate_size", std::to_string(c.width / c.tp),
                          "tp_size " + std::to_string(c.tp), "128"}),
                "");
    }
    EXPECT_TRUE(quant::slice_width("intermediate_size", c.width, c.tp, 0, 1, false).ok());
  }
  EXPECT_EQ(mismatch(quant::slice_width("intermediate_size", 768, 5, 0, 1, false).status(),
                     StatusCode::kInvalidArgument, {"intermediate_size", "got 768", "tp_size 5"}),
            "");
}

// docs/spec/checkpoints.md section 9 (11).
TEST(Loader, UnevenSlicesOfGptOss) {
  const auto rank = [](std::int64_t parts, std::int64_t r) {
    return quant::slice_width("intermediate_size", 2880, parts, r, 32, true).value();
  };
  EXPECT_EQ(rank(2, 1), (quant::WidthSlice{1440, 1440, 1440}));
  EXPECT_EQ(rank(4, 2), (quant::WidthSlice{1472, 736, 736}));
  EXPECT_EQ(rank(4, 3), (quant::WidthSlice{2208, 672, 736}));
  EXPECT_EQ(rank(8, 7), (quant::WidthSlice{2688, 192, 384}));
  EXPECT_EQ(rank(16, 14), (quant::WidthSlice{2688, 192, 192}));
  EXPECT_EQ(rank(16, 15), (quant::WidthSlice{2880, 0, 192}));
  EXPECT_EQ(rank(91, 90), (quant::WidthSlice{2880, 0, 32}));
  EXPECT_EQ(mismatch(quant::slice_width("intermediate_size", 2890, 2, 0, 32, true).status(),
                     StatusCode::kInvalidArgument, {"intermediate_size", "2890", "group 32"}),
            "");
}

// What a few bytes of configuration promise costs nothing where no tensors are.
TEST(Loader, LayersWithoutTensorsOpenAtOnce) {
  const TempDir dir;
  write_bytes(dir.path("model.safetensors"), simple_file({"a"}));
  const nlohmann::json config = {{"model_type", "qwen3_moe"},   {"hidden_size", 64},
                                 {"moe_intermediate_size", 64}, {"num_experts", 16384},
                                 {"num_hidden_layers", 4096},   {"num_experts_per_tok", 2},
                                 {"decoder_sparse_step", 1},    {"norm_topk_prob", true},
                                 {"intermediate_size", 64},     {"hidden_act", "silu"}};
  write_bytes(dir.path("config.json"), config.dump());
  const auto begin = std::chrono::steady_clock::now();
  const Result<Checkpoint> opened = Checkpoint::open(dir.path());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  EXPECT_EQ(opened->layers().size(), 4096U);
  EXPECT_LT(took.count(), 15.0);  // it was minutes
}

class Fp8Values : public testing::Test {
 protected:
  // 200 x 300: ragged in both directions, 2 x 3 tiles.
  Fp8Values() : weights(200 * 300, 0x38), scales(6, 0.5F) {}
  Status check() const {
    return checkpoint::check_fp8_block(
        {"w", "s", weights.data(), scales.data(), 200, 300, 256, 128});
  }
  std::vector<std::uint8_t> weights;
  std::vector<float> scales;
};

TEST_F(Fp8Values, EveryNanCodeIsFoundWhereverItIs) {
  EXPECT_TRUE(check().ok());
  for (const std::uint8_t code : {std::uint8_t{0x7F}, std::uint8_t{0xFF}}) {
    for (const std::size_t at : {0UL, 299UL, 300UL, 200UL * 300 - 1}) {
      weights[at] = code;
      EXPECT_EQ(mismatch(check(), StatusCode::kCorruptFile,
                         {"\"w\"", code == 0x7F ? "0x7F" : "0xFF",
                          "[" + std::to_string(256 + at / 300) + ", " +
                              std::to_string(128 + at % 300) + "]"}),
                "");
      weights[at] = 0x7E;  // the largest finite value is fine
      EXPECT_TRUE(check().ok());
    }
  }
}

TEST_F(Fp8Values, ScalesMustBePositiveAndFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {-1.0F, inf, -inf, std::numeric_limits<float>::quiet_NaN(), 0.0F, -0.0F}) {
    for (std::size_t i = 0; i < scales.size(); ++i) {
      scales[i] = bad;
      EXPECT_EQ(mismatch(check(), StatusCode::kCorruptFile,
                         {"\"s\"", "[" + std::to_string(2 + i / 3) + ", " +
                                       std::to_string(1 + i % 3) + "]"}),
                "")
          << bad;
      scales[i] = 0.5F;
    }
  }
  scales[0] = std::numeric_limits<float>::denorm_min();  // tiny is not zero
  EXPECT_TRUE(check().ok());
}

TEST_F(Fp8Values, ZeroScaleOverAZeroTileIsFine) {
  // The last tile: rows 128..199, columns 256..299; zeros of either sign.
  for (std::size_t r = 128; r < 200; ++r) {
    for (std::size_t c = 256; c < 300; ++c) weights[r * 300 + c] = (r + c) % 2 == 0 ? 0x00 : 0x80;
  }
  scales[5] = 0;
  EXPECT_TRUE(check().ok());
  weights[199 * 300 + 299] = 0x01;
  EXPECT_EQ(check().code(), StatusCode::kCorruptFile);
}

}  // namespace
}  // namespace moesaic::test
