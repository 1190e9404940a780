// Scales of super-blocks: the integers and the F16 number are found again from their products.
#include "quant/super_scales.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "numerics/float_codec.h"
#include "support/random.h"

namespace moesaic::quant {
namespace {

// A finite F16 number other than 0, its subnormals among them.
float any_unit(test::Rng& rng) {
  for (;;) {
    const auto code = static_cast<std::uint16_t>(rng.next());
    const float value = f32_from_f16(code);
    if (std::isfinite(value) && value != 0) return value;
  }
}

int any_super_code(test::Rng& rng, int bits) {
  return static_cast<int>(bits == 6 ? rng.integer(0, 63) : rng.integer(-128, 127));
}

TEST(SuperScales, IntegersAndTheirUnitAreFound) {
  test::Rng rng(1);
  for (const int bits : {6, 8}) {
    for (int round = 0; round < 20000; ++round) {
      std::array<float, 16> values{};
      const auto count = static_cast<std::size_t>(rng.integer(1, 16));
      const float d = any_unit(rng);
      // Often with a common divisor, so that the unit is not the one they were made of.
      const auto step = static_cast<int>(rng.integer(1, 9));
      for (std::size_t i = 0; i < count; ++i)
        values[i] = d * static_cast<float>(any_super_code(rng, bits) / step * step);
      std::array<std::int8_t, 16> codes{};
      std::uint16_t unit = 0;
      ASSERT_TRUE(split_super_scales({values.data(), count}, bits, codes.data(), &unit))
          << bits << " round " << round;
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(f32_from_f16(unit) * static_cast<float>(codes[i]), values[i]);
        if (bits == 6) {
          ASSERT_GE(codes[i], 0);
          ASSERT_LE(codes[i], 63);
        }
      }
    }
  }
}

TEST(SuperScales, OtherNumbersAreNotTaken) {
  const auto taken = [](std::vector<float> values, int bits) {
    std::array<std::int8_t, 16> codes{};
    std::uint16_t unit = 0;
    return split_super_scales(values, bits, codes.data(), &unit);
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(taken({0, -0.0F, 0}, 6));
  EXPECT_TRUE(taken({1, 63}, 6));
  EXPECT_TRUE(taken({-1, -63}, 6));  // the unit is negative
  EXPECT_FALSE(taken({1, -63}, 6));
  EXPECT_FALSE(taken({1, 64}, 6));
  EXPECT_TRUE(taken({1, 127, -128}, 8));
  EXPECT_TRUE(taken({1, -127, 128}, 8));
  EXPECT_FALSE(taken({1, 128, -128}, 8));
  EXPECT_FALSE(taken({1, 129}, 8));
  EXPECT_FALSE(taken({1, std::nextafter(3.0F, 4.0F)}, 8));
  EXPECT_FALSE(taken({1e-3F, 0.1F}, 8));
  EXPECT_TRUE(taken({65504.0F * 63, 65504}, 6));
  EXPECT_FALSE(taken({65504.0F * 64}, 6));
  EXPECT_FALSE(taken({0x1p-25F}, 8));  // below F16's subnormals
  EXPECT_FALSE(taken({0x1p120F, 0x1p-120F}, 8));
  EXPECT_FALSE(taken({1, kInfinity}, 8));
  EXPECT_FALSE(taken({1, std::numeric_limits<float>::quiet_NaN()}, 8));
}

}  // namespace
}  // namespace moesaic::quant
