#include "numerics/e8m0.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/random.h"
#include "support/special_values.h"

namespace moesaic {
namespace {

using test::kInf;
using test::kNan;

TEST(E8m0, DecodesEveryCode) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(static_cast<double>(f32_from_e8m0(static_cast<std::uint8_t>(code))),
              std::ldexp(1.0, code - 127));
  }
  EXPECT_TRUE(std::isnan(f32_from_e8m0(0xFF)));
}

TEST(E8m0, CeilPublishedVectors) {
  EXPECT_EQ(e8m0_from_scale_ceil(1.0F), 127);
  EXPECT_EQ(e8m0_from_scale_ceil(0.75F), 127);
  EXPECT_EQ(e8m0_from_scale_ceil(2.0F / 448.0F), 120);
  EXPECT_EQ(e8m0_from_scale_ceil(1.0F / 448.0F), 119);
  EXPECT_EQ(e8m0_from_scale_ceil(1e-10F), 0x5E);
  EXPECT_EQ(e8m0_from_scale_ceil(1.7e-4F), 115);
}

TEST(E8m0, ExponentsByRule) {
  struct Row {
    float amax;
    int round, ceil6, ceil448;
  };
  const Row rows[] = {
      {7.0F, 128, 128, 121}, {6.99F, 127, 128, 121},  {6.0F, 127, 127, 121}, {3.5F, 127, 127, 120},
      {1.0F, 125, 125, 119}, {448.0F, 134, 134, 127}, {0.0F, 0, 0, 0},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(e8m0_scale_round_1_75(row.amax), row.round) << row.amax;
    EXPECT_EQ(e8m0_scale_ceil(row.amax, 6.0F), row.ceil6) << row.amax;
    EXPECT_EQ(e8m0_scale_ceil(row.amax, 448.0F), row.ceil448) << row.amax;
  }
  // floor(log2 a) - emax + 127
  EXPECT_EQ(e8m0_scale_ocp_floor(7.0F, 2), 127);
  EXPECT_EQ(e8m0_scale_ocp_floor(3.99F, 2), 126);
  EXPECT_EQ(e8m0_scale_ocp_floor(448.0F, 8), 127);
  EXPECT_EQ(e8m0_scale_ocp_floor(0.0F, 8), 0);
}

TEST(E8m0, EdgesOfEveryRule) {
  EXPECT_EQ(e8m0_from_scale_ceil(kInf), 0xFE);
  EXPECT_EQ(e8m0_from_scale_ceil(std::numeric_limits<float>::max()), 0xFE);
  EXPECT_EQ(e8m0_from_scale_ceil(0x1p127F), 0xFE);
  EXPECT_EQ(e8m0_from_scale_ceil(0.0F), 0x00);
  EXPECT_EQ(e8m0_from_scale_ceil(-0.0F), 0x00);
  // Byte 0 may be read as 0.0, so no positive scale gets it.
  EXPECT_EQ(e8m0_from_scale_ceil(0x1p-149F), 0x01);
  EXPECT_EQ(e8m0_from_scale_ceil(0x1p-126F), 0x01);
  EXPECT_EQ(e8m0_scale_ocp_floor(0x1p-125F, 8), 0x00);
  EXPECT_EQ(e8m0_scale_round_1_75(0x1p-125F, 8), 0x00);
  for (const float bad : {kNan, -1.0F}) {
    EXPECT_EQ(e8m0_from_scale_ceil(bad), 0xFF);
    EXPECT_EQ(e8m0_scale_ceil(bad, 6.0F), 0xFF);
    EXPECT_EQ(e8m0_scale_ocp_floor(bad, 2), 0xFF);
    EXPECT_EQ(e8m0_scale_round_1_75(bad, 2), 0xFF);
  }
}

TEST(E8m0, CeilIsTheSmallestPowerOfTwoNotBelow) {
  for (int e = -126; e <= 127; ++e) {  // powers of two are fixed points
    const float s = std::ldexp(1.0F, e);
    EXPECT_EQ(f32_from_e8m0(e8m0_from_scale_ceil(s)), s);
  }
  test::Rng rng(11);
  for (int i = 0; i < 100000; ++i) {
    const auto s = static_cast<float>(
        std::ldexp(1.0 + rng.uniform(), static_cast<int>(rng.integer(-126, 125))));
    const float r = f32_from_e8m0(e8m0_from_scale_ceil(s));
    ASSERT_GE(r, s);
    ASSERT_LT(r, 2.0F * s);
  }
}

TEST(E8m0, WhichRuleSaturatesWhere) {
  // Largest scaled magnitude, for amax over two binades: CEIL never passes 6; OCP-floor does from
  // 6/4 of a binade on; ROUND@1.75 only below 7/4.
  for (int i = 0; i < 4096; ++i) {
    const float amax = 4.0F * (1.0F + static_cast<float>(i) / 4096.0F);
    EXPECT_LE(amax / f32_from_e8m0(e8m0_scale_ceil(amax, 6.0F)), 6.0F);
    EXPECT_EQ(amax / f32_from_e8m0(e8m0_scale_ocp_floor(amax, 2)) > 6.0F, amax > 6.0F);
    EXPECT_EQ(amax / f32_from_e8m0(e8m0_scale_round_1_75(amax, 2)) > 6.0F,
              amax > 6.0F && amax < 7.0F);
  }
}

}  // namespace
}  // namespace moesaic
