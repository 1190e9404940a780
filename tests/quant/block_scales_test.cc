#include "quant/block_scales.h"

#include <gtest/gtest.h>

#include <limits>

#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

TEST(BlockScaleShape, CeilsRaggedTiles) {
  EXPECT_EQ(quant::block_scale_shape({256, 128}, {}).value(), Shape({2, 1}));
  EXPECT_EQ(quant::block_scale_shape({257, 127}, {}).value(), Shape({3, 1}));
  EXPECT_EQ(quant::block_scale_shape({8, 1, 1}, {}).value(), Shape({8, 1, 1}));
  EXPECT_EQ(quant::block_scale_shape({0, 128}, {}).value(), Shape({0, 1}));
  EXPECT_EQ(quant::block_scale_shape({4, 64, 96}, {64, 32}).value(), Shape({4, 1, 3}));
  EXPECT_EQ(quant::block_scale_shape({0, std::numeric_limits<std::int64_t>::max()}, {1, 1}).value(),
            Shape({0, std::numeric_limits<std::int64_t>::max()}));
}

TEST(BlockScaleShape, Misuse) {
  expect_refusal(quant::block_scale_shape({128}, {}).status(), StatusCode::kInvalidShape,
                 {"weight", "[128]", "rank"});
  expect_refusal(quant::block_scale_shape({128, 128}, {0, 128}).status(),
                 StatusCode::kInvalidArgument, {"block", "0x128"});
  expect_refusal(quant::block_scale_shape({128, 128}, {128, -1}).status(),
                 StatusCode::kInvalidArgument, {"block", "128x-1"});
  const std::int64_t big = std::int64_t{1} << 32;
  expect_refusal(quant::block_scale_shape({big, big}, {}).status(), StatusCode::kLimitExceeded,
                 {"2^63"});
}

TEST(BlockScaleShape, MessageNamesFoundNeededAndWhy) {
  Tensor scale = Tensor::zeros(DType::kF32, {8, 7, 14}).value();
  const Status s = quant::expect_block_scale_shape("w2_scale", scale.view(), {8, 1024, 1792}, {});
  EXPECT_EQ(s.code(), StatusCode::kInvalidShape);
  EXPECT_EQ(s.message(),
            "w2_scale: got [8, 7, 14], need [8, 8, 14] for block 128x128 of [8, 1024, 1792]");
}

// A [2, 3, 2] grid of scales over [2, 300, 200] weights of ones.
struct Fixture {
  Tensor weight = Tensor::zeros(DType::kF8E4M3, {2, 300, 200}).value();
  Tensor scale = Tensor::zeros(DType::kF32, {2, 3, 2}).value();
  Fixture() {
    for (std::int64_t i = 0; i < weight.bytes(); ++i) weight.as<std::uint8_t>()[i] = 0x38;
    for (int i = 0; i < 12; ++i) scale.as<float>()[i] = 1e-3F;
  }
  Status validate() const {
    return quant::validate_block_scales("w1_scale", scale.view(), weight.view(), {});
  }
};

TEST(ValidateBlockScales, AcceptsPositiveFinite) {
  Fixture f;
  EXPECT_TRUE(f.validate().ok());
  f.scale.as<float>()[3] = std::numeric_limits<float>::denorm_min();
  f.scale.as<float>()[4] = std::numeric_limits<float>::max();
  EXPECT_TRUE(f.validate().ok());
}

TEST(ValidateBlockScales, RefusesBadValuesNamingTheIndex) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::pair<float, const char*> bad[] = {
      {std::numeric_limits<float>::quiet_NaN(), "NaN"},
      {inf, "inf"},
      {-inf, "-inf"},
      {-0.5F, "-0.5"},
  };
  for (const auto& [value, text] : bad) {
    Fixture f;
    f.scale.as<float>()[1 * 6 + 2 * 2 + 1] = value;
    expect_refusal(f.validate(), StatusCode::kInvalidArgument,
                   {"w1_scale[1, 2, 1]", text, "positive finite"});
  }
}

TEST(ValidateBlockScales, ZeroOnlyOverZeroWeights) {
  Fixture f;
  f.scale.as<float>()[1 * 6 + 2 * 2 + 1] = 0.0F;  // the ragged corner tile of the second matrix
  expect_refusal(f.validate(), StatusCode::kInvalidArgument,
                 {"w1_scale[1, 2, 1]", "got 0", "not all zero"});
  for (int r = 256; r < 300; ++r) {
    for (int c = 128; c < 200; ++c) {
      f.weight.as<std::uint8_t>()[(300 + r) * 200 + c] = r % 2 == 0 ? 0x00 : 0x80;
    }
  }
  EXPECT_TRUE(f.validate().ok());
  f.weight.as<std::uint8_t>()[(300 + 299) * 200 + 199] = 0x01;
  EXPECT_FALSE(f.validate().ok());
}

TEST(ValidateBlockScales, NarrowScaleTypesAndMisuse) {
  Tensor weight = Tensor::zeros(DType::kF8E4M3, {128, 256}).value();
  Tensor e8m0 = Tensor::zeros(DType::kF8E8M0, {1, 2}).value();
  EXPECT_TRUE(quant::validate_block_scales("s", e8m0.view(), weight.view(), {}).ok());
  e8m0.as<std::uint8_t>()[1] = 0xFF;
  expect_refusal(quant::validate_block_scales("s", e8m0.view(), weight.view(), {}),
                 StatusCode::kInvalidArgument, {"s[0, 1]", "NaN"});
  Tensor bf16 = Tensor::zeros(DType::kBF16, {1, 2}).value();
  bf16.as<std::uint16_t>()[0] = 0x7F80;
  expect_refusal(quant::validate_block_scales("s", bf16.view(), weight.view(), {}),
                 StatusCode::kInvalidArgument, {"s[0, 0]", "inf"});
  Tensor i32 = Tensor::zeros(DType::kI32, {1, 2}).value();
  expect_refusal(quant::validate_block_scales("s", i32.view(), weight.view(), {}),
                 StatusCode::kInvalidDType, {"s", "I32", "F32"});
  expect_refusal(quant::validate_block_scales("s", bf16.view(), bf16.view(), {}),
                 StatusCode::kInvalidDType, {"weight", "BF16", "F8_E4M3"});
  ConstTensorView null = bf16.view();
  null.data = nullptr;
  expect_refusal(quant::validate_block_scales("s", null, weight.view(), {}),
                 StatusCode::kInvalidArgument, {"s", "null"});
}

}  // namespace
}  // namespace moesaic
