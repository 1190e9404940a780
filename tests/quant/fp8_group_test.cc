#include "quant/fp8_group.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "numerics/codec.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
constexpr auto kPlain = quant::ScaleRounding::kNone;
constexpr auto kCeil = quant::ScaleRounding::kCeilPowerOfTwo;

struct Fp8Groups {
  Tensor q, scale;
};
Fp8Groups quantize_groups(const Tensor& x, std::int64_t group = quant::kFp8BlockSize,
                          quant::ScaleRounding rounding = kPlain) {
  Fp8Groups r;
  r.q = Tensor::zeros(DType::kF8E4M3, x.shape()).value();
  r.scale = Tensor::zeros(DType::kF32, {x.shape()[0], x.shape()[1] / group}).value();
  test::poison(r.q.view());
  test::poison(r.scale.view());
  const Status s = quant::quantize_fp8_group(x.view(), group, rounding, r.q.view(), r.scale.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return r;
}

TEST(Fp8Group, PublishedBytes) {
  const float x[] = {0.5F, -1.75F, 3.0F, 0.01F};
  std::uint8_t q[4];
  float s = 0;
  quant::ref_quantize_fp8_row(x, 4, 4, kPlain, q, &s);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(s), 0x3BDB6DB7U);
  const std::uint8_t plain[] = {0x69, 0xF8, 0x7E, 0x3C};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(q[i], plain[i]);
  quant::ref_quantize_fp8_row(x, 4, 4, kCeil, q, &s);
  EXPECT_EQ(s, f32_from_e8m0(120));
  const std::uint8_t ceiled[] = {0x68, 0xF6, 0x7C, 0x3A};
  const float back[] = {0.5F, -1.75F, 3.0F, 0.009765625F};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(q[i], ceiled[i]);
    EXPECT_EQ(f32_from_e4m3(q[i]) * s, back[i]);
  }
}

TEST(Fp8Group, ZeroGroupsHaveDocumentedScales) {
  const Tensor zero = Tensor::zeros(DType::kF32, {1, 256}).value();
  const Fp8Groups plain = quantize_groups(zero);
  const Fp8Groups ceiled = quantize_groups(zero, 128, kCeil);
  for (int g = 0; g < 2; ++g) {
    EXPECT_EQ(plain.scale.as<std::uint32_t>()[g], 0x2A7B5123U);
    EXPECT_EQ(ceiled.scale.as<float>()[g], f32_from_e8m0(0x5E));
  }
  for (int i = 0; i < 256; ++i) EXPECT_EQ(plain.q.as<std::uint8_t>()[i], 0);
}

TEST(Fp8Group, FollowsTheDefinition) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    test::Rng rng(41);
    const Tensor x = test::random_normal(rng, dtype, {5, 384});
    const std::vector<double> values = test::to_doubles(x.view());
    const Fp8Groups r = quantize_groups(x);
    for (std::size_t m = 0; m < 5; ++m) {
      for (std::size_t g = 0; g < 3; ++g) {
        float amax = 0;
        for (std::size_t i = 0; i < 128; ++i) {
          amax = std::max(amax, static_cast<float>(std::abs(values[m * 384 + g * 128 + i])));
        }
        const float s = amax / 448.0F;
        ASSERT_EQ(r.scale.as<float>()[m * 3 + g], s);
        for (std::size_t i = 0; i < 128; ++i) {
          const std::size_t at = m * 384 + g * 128 + i;
          ASSERT_EQ(r.q.as<std::uint8_t>()[at], e4m3_from_f32(static_cast<float>(values[at]) / s));
        }
      }
    }
  }
}

TEST(Fp8Group, ColumnMajorScalesAreTheSameNumbers) {
  test::Rng rng(42);
  const Tensor x = test::random_normal(rng, DType::kBF16, {5, 512});
  const Fp8Groups rows = quantize_groups(x);
  // Column-major with a leading dimension padded to 8 rows.
  Tensor storage = Tensor::zeros(DType::kF32, {4, 8}).value();
  test::poison(storage.view());
  TensorView columns(storage.data(), DType::kF32, {5, 4});
  columns.strides = {1, 8};
  Tensor q = Tensor::zeros(DType::kF8E4M3, {5, 512}).value();
  ASSERT_TRUE(quant::quantize_fp8_group(x.view(), 128, kPlain, q.view(), columns).ok());
  std::string why;
  EXPECT_TRUE(test::same_bits(q.view(), rows.q.view(), &why)) << why;
  for (int m = 0; m < 5; ++m) {
    for (int g = 0; g < 4; ++g) {
      EXPECT_EQ(storage.as<float>()[g * 8 + m], rows.scale.as<float>()[m * 4 + g]);
    }
  }
  Tensor a = Tensor::zeros(DType::kF32, {5, 512}).value();
  Tensor b = Tensor::zeros(DType::kF32, {5, 512}).value();
  ASSERT_TRUE(quant::dequantize_fp8_group(q.view(), columns, 128, a.view()).ok());
  ASSERT_TRUE(quant::dequantize_fp8_group(q.view(), rows.scale.view(), 128, b.view()).ok());
  EXPECT_TRUE(test::same_bits(a.view(), b.view(), &why)) << why;
}

TEST(Fp8Group, ErrorOnNormalDataIsTheFormatsAndCodesAreStable) {
  for (const auto& [rounding, low, high] :
       {std::tuple{kPlain, 0.0250, 0.0271}, std::tuple{kCeil, 0.0260, 0.0272}}) {
    test::Rng rng(43);
    const Tensor x = test::random_normal(rng, DType::kF32, {256, 1024});
    const Fp8Groups once = quantize_groups(x, 128, rounding);
    Tensor back = Tensor::zeros(DType::kF32, {256, 1024}).value();
    ASSERT_TRUE(
        quant::dequantize_fp8_group(once.q.view(), once.scale.view(), 128, back.view()).ok());
    const double error =
        test::compare(test::to_doubles(back.view()), test::to_doubles(x.view())).rel_l2;
    EXPECT_GT(error, low);
    EXPECT_LT(error, high);
    const Fp8Groups twice = quantize_groups(back, 128, rounding);
    std::string why;
    if (rounding == kPlain) {
      EXPECT_TRUE(test::same_bits(once.q.view(), twice.q.view(), &why)) << why;
    }
    // A largest element rounded down to 224 lets the power of two halve: other codes, same values.
    Tensor again = Tensor::zeros(DType::kF32, {256, 1024}).value();
    ASSERT_TRUE(
        quant::dequantize_fp8_group(twice.q.view(), twice.scale.view(), 128, again.view()).ok());
    if (rounding == kCeil) {
      EXPECT_TRUE(test::same_bits(again.view(), back.view(), &why)) << why;
    }
  }
}

TEST(Fp8Group, RowsAndGroupsAreIndependent) {
  test::Rng rng(44);
  Tensor x = test::random_normal(rng, DType::kF32, {3, 256});
  const Fp8Groups before = quantize_groups(x);
  for (int i = 0; i < 128; ++i) x.as<float>()[256 + i] *= 1000.0F;  // row 1, group 0
  const Fp8Groups after = quantize_groups(x);
  for (int m = 0; m < 3; ++m) {
    for (int g = 0; g < 2; ++g) {
      const bool changed = m == 1 && g == 0;
      EXPECT_EQ(before.scale.as<float>()[m * 2 + g] != after.scale.as<float>()[m * 2 + g], changed);
      if (!changed) {
        const auto at = static_cast<std::size_t>(m * 256 + g * 128);
        EXPECT_EQ(std::memcmp(before.q.data() + at, after.q.data() + at, 128), 0);
      }
    }
  }
}

TEST(Fp8Group, EdgeRows) {
  Tensor x = Tensor::zeros(DType::kF32, {4, 128}).value();
  float* p = x.as<float>();
  p[0] = 1e30F;  // one huge outlier: the rest becomes zero
  p[1] = 1.0F;
  for (int i = 0; i < 128; ++i) p[128 + i] = 0x1p-149F;  // subnormals: below the floor, all zero
  p[256] = std::numeric_limits<float>::quiet_NaN();      // NaN: a finite code, scale of the others
  p[257] = 2.0F;
  p[384] = std::numeric_limits<float>::max();
  const Fp8Groups r = quantize_groups(x);
  EXPECT_EQ(r.q.as<std::uint8_t>()[0], 0x7E);
  EXPECT_EQ(r.q.as<std::uint8_t>()[1], 0x00);
  EXPECT_EQ(r.scale.as<std::uint32_t>()[1], 0x2A7B5123U);
  EXPECT_EQ(r.q.as<std::uint8_t>()[128], 0x00);
  EXPECT_EQ(r.scale.as<float>()[2], 2.0F / 448.0F);
  EXPECT_EQ(r.q.as<std::uint8_t>()[256], 0x7E);
  EXPECT_EQ(r.q.as<std::uint8_t>()[257], 0x7E);
  EXPECT_EQ(r.q.as<std::uint8_t>()[384], 0x7E);
  const Fp8Groups up = quantize_groups(x, 128, kCeil);
  for (int m = 0; m < 4; ++m) {
    const float s = up.scale.as<float>()[m];
    EXPECT_EQ(f32_from_e8m0(e8m0_from_scale_ceil(s)), s) << "a power of two";
    EXPECT_GE(s, r.scale.as<float>()[m]);
  }
  const Tensor none = Tensor::zeros(DType::kBF16, {0, 128}).value();
  quantize_groups(none);
}

TEST(Fp8Group, Misuse) {
  Tensor x = Tensor::zeros(DType::kF32, {2, 130}).value();
  Tensor q = Tensor::zeros(DType::kF8E4M3, {2, 130}).value();
  Tensor scale = Tensor::zeros(DType::kF32, {2, 1}).value();
  expect_refusal(quant::quantize_fp8_group(x.view(), 128, kPlain, q.view(), scale.view()),
                 StatusCode::kInvalidShape, {"x", "K = 130", "multiple", "128"});
  for (const std::int64_t group : {0, -128}) {
    expect_refusal(quant::quantize_fp8_group(x.view(), group, kPlain, q.view(), scale.view()),
                   StatusCode::kInvalidArgument, {"group", ">= 1"});
  }
  expect_refusal(quant::quantize_fp8_group(x.view(), 65, kPlain, q.view(), scale.view()),
                 StatusCode::kInvalidShape, {"scale", "[2, 1]", "[2, 2]"});
  expect_refusal(quant::quantize_fp8_group(q.view(), 130, kPlain, q.view(), scale.view()),
                 StatusCode::kInvalidDType, {"x", "F8_E4M3", "F32"});
  TensorView inside(x.data(), DType::kF8E4M3, {2, 130});
  expect_refusal(quant::quantize_fp8_group(x.view(), 130, kPlain, inside, scale.view()),
                 StatusCode::kAliasing, {"x", "q"});
  expect_refusal(quant::dequantize_fp8_group(q.view(), scale.view(), 128, x.view()),
                 StatusCode::kInvalidShape, {"out", "130"});
  TensorView broadcast(scale.data(), DType::kF32, {2, 2});
  broadcast.strides = {1, 1};
  expect_refusal(quant::quantize_fp8_group(x.view(), 65, kPlain, q.view(), broadcast),
                 StatusCode::kInvalidLayout, {"scale", "[1, 1]", "column-major"});
  // Column-major scales whose last line reaches into the codes.
  TensorView reaching(q.data() - 4, DType::kF32, {2, 1});
  expect_refusal(quant::quantize_fp8_group(x.view(), 130, kPlain, q.view(), reaching),
                 StatusCode::kAliasing, {"q", "scale"});
  Tensor line = Tensor::zeros(DType::kF32, {260}).value();
  expect_refusal(quant::quantize_fp8_group(line.view(), 130, kPlain, q.view(), scale.view()),
                 StatusCode::kInvalidShape, {"x", "[260]", "rank 2"});
}

}  // namespace
}  // namespace moesaic
