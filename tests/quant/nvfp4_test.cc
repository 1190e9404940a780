#include "quant/nvfp4.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/codec.h"
#include "support/refusal.h"
#include "tensors.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::poisoned;

struct Nvfp4Groups {
  Tensor q, scale;
};
Nvfp4Groups quantize(const Tensor& x, float gscale) {
  Nvfp4Groups r{poisoned(DType::kF4E2M1, x.shape()),
                poisoned(DType::kF8E4M3, {x.shape()[0], x.shape()[1] / quant::kNvfp4GroupSize})};
  const Status s = quant::quantize_nvfp4(x.view(), gscale, r.q.view(), r.scale.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return r;
}
Tensor dequantize(const Nvfp4Groups& r, float global_scale) {
  Tensor out = poisoned(DType::kF32, r.q.shape());
  const Status s = quant::dequantize_nvfp4(r.q.view(), r.scale.view(), global_scale, out.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return out;
}
float amax_of(const Tensor& x) {
  float amax = 0;
  for (std::int64_t i = 0; i < x.bytes() / 4; ++i)
    amax = std::max(amax, std::abs(x.as<float>()[i]));
  return amax;
}

TEST(Nvfp4, PublishedBytes) {
  EXPECT_EQ(quant::nvfp4_quant_multiplier(4.0F), 672.0F);
  EXPECT_EQ(quant::nvfp4_quant_multiplier(0.0F), 1.0F);
  std::vector<float> x(16);
  for (std::size_t i = 0; i < 16; ++i) x[i] = -0.8F + 0.1F * static_cast<float>(i);
  const Nvfp4Groups r = quantize(test::f32_of({1, 16}, x), 672.0F);
  EXPECT_EQ(r.scale.as<std::uint8_t>()[0], 0x6B);
  EXPECT_EQ(test::bytes_of(r.q),
            (std::vector<std::uint8_t>{0xFF, 0xEE, 0xCD, 0xAB, 0x20, 0x43, 0x65, 0x76}));
  const Tensor back = dequantize(r, 1.0F / 672.0F);
  EXPECT_NEAR(static_cast<double>(back.as<float>()[0]), -0.785714, 1e-6);
  EXPECT_NEAR(static_cast<double>(back.as<float>()[9]), 0.130952, 1e-6);
}

TEST(Nvfp4, FollowsTheDefinition) {
  test::Rng rng(4);
  const Tensor x = test::random_normal(rng, DType::kF32, {9, 80}, 2.0);
  const float gscale = quant::nvfp4_quant_multiplier(amax_of(x));
  const Nvfp4Groups r = quantize(x, gscale);
  const Tensor back = dequantize(r, 1.0F / gscale);
  for (std::int64_t g = 0; g < 9 * 5; ++g) {
    float amax = 0;
    for (std::int64_t i = g * 16; i < g * 16 + 16; ++i) {
      amax = std::max(amax, std::abs(x.as<float>()[i]));
    }
    const std::uint8_t byte = e4m3_from_f32(gscale * (amax / 6.0F));
    ASSERT_EQ(r.scale.as<std::uint8_t>()[g], byte);
    for (std::int64_t i = g * 16; i < g * 16 + 16; ++i) {
      const float code =
          f32_from_e2m1(e2m1_from_f32(x.as<float>()[i] * (gscale / f32_from_e4m3(byte))));
      ASSERT_EQ(back.as<float>()[i], code * f32_from_e4m3(byte) * (1.0F / gscale));
    }
  }
}

TEST(Nvfp4, ErrorOnNormalDataIsTheFormats) {
  const Tensor x = test::gaussian();
  const float gscale = quant::nvfp4_quant_multiplier(amax_of(x));
  const Tensor back = dequantize(quantize(x, gscale), 1.0F / gscale);
  EXPECT_NEAR(test::rel_l2(back, x) / 0.0952, 1.0, 0.02);
  // Multiplying by a power of two changes nothing but the global scale.
  Tensor scaled = test::gaussian();
  for (std::int64_t i = 0; i < 256 * 1024; ++i) scaled.as<float>()[i] *= 0x1p-20F;
  const float scaled_gscale = quant::nvfp4_quant_multiplier(amax_of(scaled));
  EXPECT_EQ(scaled_gscale, gscale * 0x1p20F);
  std::string why;
  EXPECT_TRUE(
      test::same_bits(quantize(scaled, scaled_gscale).q.view(), quantize(x, gscale).q.view(), &why))
      << why;
}

TEST(Nvfp4, SmallMultipliersClipAndZeroBlocksAreZero) {
  // Calibrated for a tenth of the real range: the block scale saturates, elements clip at
  // 6 * 448 / gscale.
  std::vector<float> x(32, 0.0F);
  x[0] = 10.0F;
  x[1] = -10.0F;
  x[2] = 0.5F;
  const float gscale = quant::nvfp4_quant_multiplier(1.0F);
  const Nvfp4Groups r = quantize(test::f32_of({1, 32}, x), gscale);
  EXPECT_EQ(r.scale.as<std::uint8_t>()[0], 0x7E);
  EXPECT_EQ(r.scale.as<std::uint8_t>()[1], 0);
  const Tensor back = dequantize(r, 1.0F / gscale);
  EXPECT_NEAR(static_cast<double>(back.as<float>()[0]), 1.0, 1e-6);
  EXPECT_NEAR(static_cast<double>(back.as<float>()[1]), -1.0, 1e-6);
  EXPECT_NEAR(static_cast<double>(back.as<float>()[2]), 0.5, 0.1);
  for (int i = 16; i < 32; ++i) EXPECT_EQ(back.as<float>()[i], 0.0F);
  EXPECT_EQ(quant::nvfp4_quant_multiplier(1e-38F), 0x1p100F);
}

TEST(Nvfp4, Misuse) {
  Tensor x = Tensor::zeros(DType::kF32, {2, 32}).value();
  Tensor q = Tensor::zeros(DType::kF4E2M1, {2, 32}).value();
  Tensor scale = Tensor::zeros(DType::kF8E4M3, {2, 2}).value();
  EXPECT_TRUE(quant::quantize_nvfp4(x.view(), 1.0F, q.view(), scale.view()).ok());
  expect_refusal(quant::quantize_nvfp4(x.view(), 0.0F, q.view(), scale.view()),
                 StatusCode::kInvalidArgument, {"gscale", "positive finite"});
  expect_refusal(quant::dequantize_nvfp4(q.view(), scale.view(), -1.0F, x.view()),
                 StatusCode::kInvalidArgument, {"global_scale", "positive finite"});
  Tensor odd = Tensor::zeros(DType::kF32, {2, 24}).value();
  expect_refusal(quant::quantize_nvfp4(odd.view(), 1.0F, q.view(), scale.view()),
                 StatusCode::kInvalidShape, {"x", "[2, 24]", "multiple of 16"});
  for (const std::uint8_t bad : {std::uint8_t{0x7F}, std::uint8_t{0xB8}}) {  // NaN, -1
    scale.as<std::uint8_t>()[3] = bad;
    expect_refusal(quant::dequantize_nvfp4(q.view(), scale.view(), 1.0F, x.view()),
                   StatusCode::kInvalidArgument, {"scale", "row 1, block 1", ">= 0"});
  }
}

}  // namespace
}  // namespace moesaic
