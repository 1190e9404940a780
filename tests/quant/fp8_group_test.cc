#include "quant/fp8_group.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "numerics/codec.h"
#include "support/fp8_rows.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

constexpr auto kPlain = quant::ScaleRounding::kNone;
constexpr auto kCeil = quant::ScaleRounding::kCeilPowerOfTwo;

using test::Fp8Rows;

Tensor values_of(const Fp8Rows& r) {
  Tensor out = Tensor::zeros(DType::kF32, r.codes.shape()).value();
  for (std::int64_t i = 0; i < r.codes.bytes(); ++i) {
    out.as<float>()[i] = f32_from_e4m3(r.codes.as<std::uint8_t>()[i]) *
                         r.scales.as<float>()[i / quant::kFp8BlockSize];
  }
  return out;
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
  const Fp8Rows plain = test::fp8_rows(zero, kPlain);
  const Fp8Rows ceiled = test::fp8_rows(zero, kCeil);
  for (int g = 0; g < 2; ++g) {
    EXPECT_EQ(plain.scales.as<std::uint32_t>()[g], 0x2A7B5123U);
    EXPECT_EQ(ceiled.scales.as<float>()[g], f32_from_e8m0(0x5E));
  }
  for (int i = 0; i < 256; ++i) EXPECT_EQ(plain.codes.as<std::uint8_t>()[i], 0);
}

TEST(Fp8Group, FollowsTheDefinition) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    test::Rng rng(41);
    const Tensor x = test::random_normal(rng, dtype, {5, 384});
    const std::vector<double> values = test::to_doubles(x.view());
    const Fp8Rows r = test::fp8_rows(x, kPlain);
    for (std::size_t m = 0; m < 5; ++m) {
      for (std::size_t g = 0; g < 3; ++g) {
        float amax = 0;
        for (std::size_t i = 0; i < 128; ++i) {
          amax = std::max(amax, static_cast<float>(std::abs(values[m * 384 + g * 128 + i])));
        }
        const float s = amax / 448.0F;
        ASSERT_EQ(r.scales.as<float>()[m * 3 + g], s);
        for (std::size_t i = 0; i < 128; ++i) {
          const std::size_t at = m * 384 + g * 128 + i;
          ASSERT_EQ(r.codes.as<std::uint8_t>()[at],
                    e4m3_from_f32(static_cast<float>(values[at]) / s));
        }
      }
    }
  }
}

TEST(Fp8Group, ErrorOnNormalDataIsTheFormatsAndCodesAreStable) {
  for (const auto& [rounding, low, high] :
       {std::tuple{kPlain, 0.0250, 0.0271}, std::tuple{kCeil, 0.0260, 0.0272}}) {
    test::Rng rng(43);
    const Tensor x = test::random_normal(rng, DType::kF32, {256, 1024});
    const Fp8Rows once = test::fp8_rows(x, rounding);
    const Tensor back = values_of(once);
    const double error =
        test::compare(test::to_doubles(back.view()), test::to_doubles(x.view())).rel_l2;
    EXPECT_GT(error, low);
    EXPECT_LT(error, high);
    const Fp8Rows twice = test::fp8_rows(back, rounding);
    std::string why;
    if (rounding == kPlain) {
      EXPECT_TRUE(test::same_bits(once.codes.view(), twice.codes.view(), &why)) << why;
    }
    // A largest element rounded down to 224 lets the power of two halve: other codes, same values.
    const Tensor again = values_of(twice);
    if (rounding == kCeil) {
      EXPECT_TRUE(test::same_bits(again.view(), back.view(), &why)) << why;
    }
  }
}

TEST(Fp8Group, RowsAndGroupsAreIndependent) {
  test::Rng rng(44);
  Tensor x = test::random_normal(rng, DType::kF32, {3, 256});
  const Fp8Rows before = test::fp8_rows(x, kPlain);
  for (int i = 0; i < 128; ++i) x.as<float>()[256 + i] *= 1000.0F;  // row 1, group 0
  const Fp8Rows after = test::fp8_rows(x, kPlain);
  for (int m = 0; m < 3; ++m) {
    for (int g = 0; g < 2; ++g) {
      const bool changed = m == 1 && g == 0;
      EXPECT_EQ(before.scales.as<float>()[m * 2 + g] != after.scales.as<float>()[m * 2 + g],
                changed);
      if (!changed) {
        const auto at = static_cast<std::size_t>(m * 256 + g * 128);
        EXPECT_EQ(std::memcmp(before.codes.data() + at, after.codes.data() + at, 128), 0);
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
  const Fp8Rows r = test::fp8_rows(x, kPlain);
  EXPECT_EQ(r.codes.as<std::uint8_t>()[0], 0x7E);
  EXPECT_EQ(r.codes.as<std::uint8_t>()[1], 0x00);
  EXPECT_EQ(r.scales.as<std::uint32_t>()[1], 0x2A7B5123U);
  EXPECT_EQ(r.codes.as<std::uint8_t>()[128], 0x00);
  EXPECT_EQ(r.scales.as<float>()[2], 2.0F / 448.0F);
  EXPECT_EQ(r.codes.as<std::uint8_t>()[256], 0x7E);
  EXPECT_EQ(r.codes.as<std::uint8_t>()[257], 0x7E);
  EXPECT_EQ(r.codes.as<std::uint8_t>()[384], 0x7E);
  const Fp8Rows up = test::fp8_rows(x, kCeil);
  for (int m = 0; m < 4; ++m) {
    const float s = up.scales.as<float>()[m];
    EXPECT_EQ(f32_from_e8m0(e8m0_from_scale_ceil(s)), s) << "a power of two";
    EXPECT_GE(s, r.scales.as<float>()[m]);
  }
  const Tensor none = Tensor::zeros(DType::kBF16, {0, 128}).value();
  test::fp8_rows(none, kPlain);
}

}  // namespace
}  // namespace moesaic
