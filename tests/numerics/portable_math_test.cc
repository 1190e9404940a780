// The portable functions against the C library in double: bounds in ulps of the fp32 result.
#include "numerics/portable_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "support/random.h"

namespace moesaic {
namespace {

using test::Rng;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Distance of `got` from the exact value in units of the last place there.
double ulps(float got, double exact) {
  int exponent = 0;
  (void)std::frexp(exact, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 24, -149));
  return std::abs(static_cast<double>(got) - exact) / unit;
}

TEST(PortableMath, ExpIsWithinHalfAnUlpAndABit) {
  Rng rng(1);
  double worst = 0;
  for (int i = 0; i < 400000; ++i) {
    const double span = i % 4 == 0 ? 103.0 : i % 4 == 1 ? 20.0 : i % 4 == 2 ? 1.0 : 1e-3;
    const auto x = static_cast<float>((2 * rng.uniform() - 1) * span);
    if (x > 88.7F) continue;
    worst = std::max(worst, ulps(portable_exp(x), std::exp(static_cast<double>(x))));
  }
  EXPECT_LE(worst, 0.51);
  EXPECT_GE(worst, 0.4) << "the comparison itself looks wrong";
}

TEST(PortableMath, ExpOfSpecialValues) {
  EXPECT_EQ(portable_exp(0.0F), 1.0F);
  EXPECT_EQ(portable_exp(-0.0F), 1.0F);
  EXPECT_EQ(portable_exp(-kInfinity), 0.0F);
  EXPECT_EQ(portable_exp(-200.0F), 0.0F);
  EXPECT_EQ(portable_exp(kInfinity), kInfinity);
  EXPECT_EQ(portable_exp(89.0F), kInfinity);
  EXPECT_TRUE(std::isnan(portable_exp(std::nanf(""))));
  EXPECT_GT(portable_exp(-103.0F), 0.0F) << "subnormal, not flushed";
}

TEST(PortableMath, SoftplusIsWithinHalfAnUlpAndABit) {
  Rng rng(2);
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const auto x = static_cast<float>((2 * rng.uniform() - 1) * (i % 2 == 0 ? 80.0 : 2.0));
    const double exact = (x > 0 ? static_cast<double>(x) : 0.0) +
                         std::log1p(std::exp(-std::abs(static_cast<double>(x))));
    worst = std::max(worst, ulps(portable_softplus(x), exact));
  }
  EXPECT_LE(worst, 0.51);
  EXPECT_EQ(portable_softplus(kInfinity), kInfinity);
  EXPECT_EQ(portable_softplus(-kInfinity), 0.0F);
  EXPECT_TRUE(std::isnan(portable_softplus(std::nanf(""))));
}

TEST(PortableMath, PowIsWithinHalfAnUlpAndABit) {
  Rng rng(3);
  double worst = 0;
  for (int i = 0; i < 200000; ++i) {
    const auto base = static_cast<float>(std::exp(8 * rng.uniform() - 6));
    const auto exponent = static_cast<float>(0.05 + 3 * rng.uniform());
    worst = std::max(
        worst, ulps(portable_pow(base, exponent), std::pow(static_cast<double>(base), exponent)));
  }
  EXPECT_LE(worst, 0.51);
  EXPECT_EQ(portable_pow(0.0F, 2.0F), 0.0F);
  EXPECT_EQ(portable_pow(1.0F, 3.5F), 1.0F);
}

}  // namespace
}  // namespace moesaic
