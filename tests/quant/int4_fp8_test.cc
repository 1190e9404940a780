#include "quant/int4_fp8.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "numerics/codec.h"
#include "quant/code_values.h"
#include "quant/int_group.h"
#include "support/refusal.h"
#include "tensors.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::f32_of;
using test::poisoned;

// The products of codes -8 .. -1 with a scale, as e4m3 bytes.
std::array<std::uint8_t, 8> negative_products(float scale) {
  std::array<std::uint8_t, 8> bytes{};
  for (int i = 0; i < 8; ++i) {
    bytes[static_cast<std::size_t>(i)] = e4m3_from_f32(quant::int4_fp8_value(i - 8, scale));
  }
  return bytes;
}

TEST(Int4Fp8, PublishedProducts) {
  EXPECT_EQ(negative_products(1.25F),
            (std::array<std::uint8_t, 8>{0xD2, 0xD1, 0xCF, 0xCC, 0xCA, 0xC7, 0xC2, 0xBA}));
  EXPECT_EQ(negative_products(56.0F),
            (std::array<std::uint8_t, 8>{0xFE, 0xFC, 0xFA, 0xF9, 0xF6, 0xF2, 0xEE, 0xE6}));
  // Every scale that splitting can produce (at most 56): an e4m3 number each, of the code's sign.
  for (int byte = 0; byte <= 0x66; ++byte) {
    const float scale = f32_from_e4m3(static_cast<std::uint8_t>(byte));
    if (scale > 56.0F) break;
    for (int q = -8; q < 8; ++q) {
      const float value = quant::int4_fp8_value(q, scale);
      EXPECT_EQ(value, f32_from_e4m3(e4m3_from_f32(static_cast<float>(q) * scale)));
      EXPECT_EQ(quant::int4_fp8_value(-q, scale), -value);
      EXPECT_EQ(f32_from_e4m3(e4m3_from_f32(value)), value);
    }
  }
}

TEST(Int4Fp8, PublishedScales) {
  Tensor scale = poisoned(DType::kF8E4M3, {1, 4});
  Tensor channel = poisoned(DType::kF32, {1});
  ASSERT_TRUE(quant::split_int4_fp8_scales(f32_of({1, 4}, {0.01F, 0.02F, 0.015F, 0.005F}).view(),
                                           scale.view(), channel.view())
                  .ok());
  // 224, 448, 336, 112 of the channel scale, over 8. 336 is a tie of e4m3: to even, 320 (not 352).
  EXPECT_EQ(test::bytes_of(scale), (std::vector<std::uint8_t>{0x5E, 0x66, 0x62, 0x56}));
  EXPECT_EQ(channel.as<float>()[0], 8.0F * (0.02F / 448.0F));
  // The floor: a row of small scales.
  ASSERT_TRUE(quant::split_int4_fp8_scales(f32_of({1, 4}, {1e-4F, 1e-4F, 1e-4F, 1e-4F}).view(),
                                           scale.view(), channel.view())
                  .ok());
  EXPECT_EQ(channel.as<float>()[0], 8.0F / (448.0F * 512.0F));
  // It would round tiny ones to 0.
  ASSERT_TRUE(quant::split_int4_fp8_scales(f32_of({1, 4}, {1e-9F, 2e-9F, 1e-9F, 1e-9F}).view(),
                                           scale.view(), channel.view())
                  .ok());
  EXPECT_EQ(channel.as<float>()[0], 8.0F * (2e-9F / 448.0F));
  EXPECT_EQ(test::bytes_of(scale), (std::vector<std::uint8_t>{0x5E, 0x66, 0x5E, 0x5E}));
}

TEST(Int4Fp8, SplitScalesStayWithin6Percent) {
  test::Rng rng(12);
  Tensor group_scale = Tensor::zeros(DType::kF32, {64, 16}).value();
  for (int i = 0; i < 64 * 16; ++i) {
    group_scale.as<float>()[i] = static_cast<float>(0.01 * std::exp2(6.0 * rng.uniform()));
  }
  Tensor scale = poisoned(DType::kF8E4M3, {64, 16});
  Tensor channel = poisoned(DType::kF32, {64});
  ASSERT_TRUE(quant::split_int4_fp8_scales(group_scale.view(), scale.view(), channel.view()).ok());
  for (int i = 0; i < 64 * 16; ++i) {
    const float got = f32_from_e4m3(scale.as<std::uint8_t>()[i]) * channel.as<float>()[i / 16];
    EXPECT_LT(std::abs(got / group_scale.as<float>()[i] - 1.0F), 0.063F);
    EXPECT_LE(f32_from_e4m3(scale.as<std::uint8_t>()[i]), 56.0F);
  }
}

TEST(Int4Fp8, ErrorOfTheWholeChainIsTheFormats) {
  const Tensor x = test::gaussian();
  Tensor codes = poisoned(DType::kI8, x.shape());
  Tensor group_scale = poisoned(DType::kBF16, {256, 8});
  ASSERT_TRUE(quant::quantize_int_group(x.view(), {4, 128, quant::IntScaleRule::kFullRange},
                                        codes.view(), group_scale.view())
                  .ok());
  Tensor scale = poisoned(DType::kF8E4M3, {256, 8});
  Tensor channel = poisoned(DType::kF32, {256});
  ASSERT_TRUE(quant::split_int4_fp8_scales(group_scale.view(), scale.view(), channel.view()).ok());
  Tensor out = poisoned(DType::kF32, x.shape());
  for (std::int64_t i = 0; i < 256 * 1024; ++i) {
    const std::uint8_t byte = scale.as<std::uint8_t>()[i / quant::kInt4Fp8GroupSize];
    out.as<float>()[i] = quant::int4_fp8_value(codes.as<std::int8_t>()[i], f32_from_e4m3(byte)) *
                         channel.as<float>()[i / 1024];
  }
  EXPECT_NEAR(test::rel_l2(out, x) / 0.1147, 1.0, 0.03);
}

TEST(Int4Fp8, Misuse) {
  Tensor scale = Tensor::zeros(DType::kF8E4M3, {1, 2}).value();
  Tensor channel = Tensor::zeros(DType::kF32, {1}).value();
  for (const float bad : {-1.0F, NAN, INFINITY}) {
    expect_refusal(quant::split_int4_fp8_scales(f32_of({1, 2}, {1.0F, bad}).view(), scale.view(),
                                                channel.view()),
                   bad == -1.0F ? StatusCode::kUnsupported : StatusCode::kInvalidArgument,
                   {"group_scale", "row 0, group 1", "finite number that is not negative"});
  }
}

TEST(Int4Fp8, AScaleOfZeroStaysZero) {
  Tensor scale = poisoned(DType::kF8E4M3, {2, 2});
  Tensor channel = poisoned(DType::kF32, {2});
  ASSERT_TRUE(quant::split_int4_fp8_scales(f32_of({2, 2}, {0.5F, 0.0F, 0.0F, 0.0F}).view(),
                                           scale.view(), channel.view())
                  .ok());
  EXPECT_EQ(test::bytes_of(scale), (std::vector<std::uint8_t>{0x66, 0, 0, 0}));
  EXPECT_GT(channel.as<float>()[1], 0.0F);
}

}  // namespace
}  // namespace moesaic
