#include "quant/fp8_scaled.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "numerics/codec.h"
#include "support/refusal.h"
#include "tensors.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::f32_of;
using test::poisoned;

struct Fp8Scaled {
  Tensor q, scale;
};
Fp8Scaled quantize_rows(const Tensor& x) {
  Fp8Scaled r{poisoned(DType::kF8E4M3, x.shape()), poisoned(DType::kF32, {x.shape()[0]})};
  const Status s = quant::quantize_fp8_rows(x.view(), r.q.view(), r.scale.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return r;
}
Fp8Scaled quantize_tensor(const Tensor& x) {
  Fp8Scaled r{poisoned(DType::kF8E4M3, x.shape()), poisoned(DType::kF32, {1})};
  const Status s = quant::quantize_fp8_tensor(x.view(), r.q.view(), r.scale.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return r;
}
Tensor dequantize(const Fp8Scaled& r) {
  Tensor out = poisoned(DType::kF32, r.q.shape());
  const Status s = quant::dequantize_scaled(r.q.view(), r.scale.view(), out.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return out;
}

TEST(Fp8Scaled, RowScalesHaveAFloor) {
  EXPECT_EQ(std::bit_cast<std::uint32_t>(quant::fp8_row_scale(0.0F)), 0x36924925U);
  EXPECT_EQ(quant::fp8_row_scale(448.0F), 1.0F);
  const Fp8Scaled zero = quantize_rows(Tensor::zeros(DType::kF32, {2, 5}).value());
  for (int m = 0; m < 2; ++m) EXPECT_EQ(zero.scale.as<std::uint32_t>()[m], 0x36924925U);
  for (const std::uint8_t byte : test::bytes_of(zero.q)) EXPECT_EQ(byte, 0);
}

TEST(Fp8Scaled, RowsOfSmallWeightsKeepTheirBits) {
  EXPECT_EQ(quantize_rows(f32_of({1, 1}, {1e-4F})).scale.as<float>()[0], 1.0F / (448.0F * 512.0F));
  const Fp8Scaled r = quantize_rows(f32_of({2, 2}, {448e-30F, 1e-30F, 0x1p-149F, 0x1p-140F}));
  EXPECT_EQ(r.scale.as<float>()[0], 448e-30F / 448.0F);
  EXPECT_EQ(r.scale.as<float>()[1], 0x1p-126F);  // 1/scale stays finite
  EXPECT_EQ(test::bytes_of(r.q), (std::vector<std::uint8_t>{0x7E, 0x38, 0x00, 0x00}));
}

TEST(Fp8Scaled, FollowsTheDefinition) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    test::Rng rng(2);
    const Tensor x = test::random_normal(rng, dtype, {5, 77}, 3.0);
    const auto values = test::to_doubles(x.view());
    const Fp8Scaled rows = quantize_rows(x);
    const Fp8Scaled whole = quantize_tensor(x);
    float all = 0;
    for (std::size_t m = 0; m < 5; ++m) {
      float amax = 0;
      for (std::size_t i = 0; i < 77; ++i) {
        amax = std::max(amax, static_cast<float>(std::abs(values[m * 77 + i])));
      }
      all = std::max(all, amax);
      ASSERT_EQ(rows.scale.as<float>()[m], amax / 448.0F);
      std::vector<float> row(77);
      for (std::size_t i = 0; i < 77; ++i) row[i] = static_cast<float>(values[m * 77 + i]);
      for (std::size_t i = 0; i < 77; ++i) {
        const std::uint8_t want = e4m3_from_f32(row[i] / (amax / 448.0F));
        ASSERT_EQ(rows.q.as<std::uint8_t>()[m * 77 + i], want);
      }
    }
    ASSERT_EQ(whole.scale.as<float>()[0], all / 448.0F);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(whole.q.as<std::uint8_t>()[i],
                e4m3_from_f32(static_cast<float>(values[i]) / (all / 448.0F)));
    }
  }
}

TEST(Fp8Scaled, ErrorOnNormalDataIsTheFormatsAndCodesAreStable) {
  const Tensor x = test::gaussian();
  std::string why;
  for (const bool per_row : {true, false}) {
    const auto quantize = [&](const Tensor& t) {
      return per_row ? quantize_rows(t) : quantize_tensor(t);
    };
    const Fp8Scaled once = quantize(x);
    const Tensor back = dequantize(once);
    const double error = test::rel_l2(back, x);
    EXPECT_GT(error, 0.0250);
    EXPECT_LT(error, 0.0271);
    EXPECT_TRUE(test::same_bits(quantize(back).q.view(), once.q.view(), &why)) << why;
  }
  // Rows of very different size: only row scales keep them all.
  Tensor spread = test::gaussian(8);
  for (std::int64_t i = 0; i < 256 * 1024; ++i) {
    spread.as<float>()[i] *= std::exp2(static_cast<float>(i / 1024 % 8) * 3.0F);
  }
  Tensor first_rows = dequantize(quantize_rows(spread));
  for (std::int64_t m = 0; m < 8; ++m) {
    double err = 0, norm = 0;
    for (std::int64_t i = m * 1024; i < (m + 1) * 1024; ++i) {
      const double x0 = spread.as<float>()[i];
      err += (first_rows.as<float>()[i] - x0) * (first_rows.as<float>()[i] - x0);
      norm += x0 * x0;
    }
    EXPECT_LT(std::sqrt(err / norm), 0.028) << m;
  }
}

TEST(Fp8Scaled, ZeroTensorsGiveZeroNotNan) {
  const Fp8Scaled zero = quantize_tensor(Tensor::zeros(DType::kF32, {3, 4}).value());
  EXPECT_EQ(zero.scale.as<float>()[0], 0.0F);
  const Tensor back = dequantize(zero);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(back.as<float>()[i], 0.0F);
  // No rows at all is ordinary.
  EXPECT_EQ(quantize_rows(Tensor::zeros(DType::kF32, {0, 4}).value()).q.bytes(), 0);
}

TEST(Fp8Scaled, NanAndOutliers) {
  Tensor x = f32_of({1, 4}, {std::numeric_limits<float>::quiet_NaN(), 4.0F, -2.0F, 1e-30F});
  const Fp8Scaled r = quantize_rows(x);
  EXPECT_EQ(r.scale.as<float>()[0], 4.0F / 448.0F);
  EXPECT_EQ(test::bytes_of(r.q), (std::vector<std::uint8_t>{0x7E, 0x7E, 0xF6, 0x00}));
}

TEST(Fp8Scaled, Int8RowsDequantiseAlike) {
  const Tensor q = test::tensor_of<std::int8_t>(DType::kI8, {2, 2}, {-128, 127, 1, 0});
  Tensor out = poisoned(DType::kF32, {2, 2});
  ASSERT_TRUE(
      quant::dequantize_scaled(q.view(), f32_of({2}, {0.5F, 3.0F}).view(), out.view()).ok());
  EXPECT_EQ(test::to_doubles(out.view()), (std::vector<double>{-64, 63.5, 3, 0}));
}

TEST(Fp8Scaled, Misuse) {
  Tensor x = f32_of({2, 3}, {1, 2, 3, 4, 5, 6});
  Tensor q = Tensor::zeros(DType::kF8E4M3, {2, 3}).value();
  Tensor scale = Tensor::zeros(DType::kF32, {2}).value();
  expect_refusal(quant::quantize_fp8_rows(x.view(), q.view(), f32_of({3}, {}).view()),
                 StatusCode::kInvalidShape, {"scale", "[3]", "[2]"});
  expect_refusal(quant::quantize_fp8_rows(q.view(), q.view(), scale.view()),
                 StatusCode::kInvalidDType, {"x", "F8_E4M3", "F16, BF16 or F32"});
  TensorView inside(x.data(), DType::kF8E4M3, {2, 3});
  expect_refusal(quant::quantize_fp8_rows(x.view(), inside, scale.view()), StatusCode::kAliasing,
                 {"x", "q"});
  x.as<float>()[4] = std::numeric_limits<float>::quiet_NaN();
  TensorView one(scale.data(), DType::kF32, {1});
  expect_refusal(quant::quantize_fp8_tensor(x.view(), q.view(), one), StatusCode::kInvalidArgument,
                 {"x", "row 1, column 1", "NaN"});
}

}  // namespace
}  // namespace moesaic
