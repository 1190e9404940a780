#include "numerics/float_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <type_traits>

#include "numerics/grid.h"
#include "support/special_values.h"

namespace moesaic {
namespace {

using test::Format;
using test::kInf;
using test::kNan;
using test::value_of_code;

TEST(E4m3, PublishedVectors) {
  const std::pair<float, int> vectors[] = {
      {1.0F, 0x38},        {448.0F, 0x7E},          {464.0F, 0x7E},
      {480.0F, 0x7E},      {0x1p-6F, 0x08},         {0x1p-9F, 0x01},
      {0x1p-10F, 0x00},    {1.5F * 0x1p-10F, 0x01}, {3.0F * 0x1p-10F, 0x02},
      {0.1F, 0x1D},        {-0.3F, 0xAA},           {17.0F, 0x58},
      {18.0F, 0x59},       {19.0F, 0x5A},           {432.0F, 0x7E},
      {1.0F / 3.0F, 0x2B},
  };
  for (const auto& [x, code] : vectors) EXPECT_EQ(e4m3_from_f32(x), code) << x;
  EXPECT_EQ(f32_from_e4m3(0x1D), 0.1015625F);
  EXPECT_EQ(f32_from_e4m3(0xAA), -0.3125F);
  EXPECT_EQ(f32_from_e4m3(0x58), 16.0F);
  EXPECT_EQ(f32_from_e4m3(0x5A), 20.0F);
  EXPECT_EQ(f32_from_e4m3(0x2B), 0.34375F);
}

TEST(E5m2, PublishedVectors) {
  EXPECT_EQ(f32_from_e5m2(0x3C), 1.0F);
  EXPECT_EQ(f32_from_e5m2(0x2E), 0.09375F);
  EXPECT_EQ(f32_from_e5m2(0x01), 0x1p-16F);
  EXPECT_EQ(f32_from_e5m2(0x7B), 57344.0F);
}

TEST(E2m1, PublishedVectorsAndTies) {
  const std::pair<float, int> vectors[] = {
      {0.25F, 0}, {0.75F, 2}, {1.25F, 2}, {1.75F, 4},   {2.5F, 4},
      {3.5F, 6},  {5.0F, 6},  {7.0F, 7},  {-0.3F, 0x9}, {5.0001F, 7},
  };
  for (const auto& [x, code] : vectors) EXPECT_EQ(e2m1_from_f32(x), code) << x;
  const float values[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  for (int c = 0; c < 8; ++c) {
    EXPECT_EQ(f32_from_e2m1(static_cast<std::uint8_t>(c)), values[c]);
    EXPECT_EQ(f32_from_e2m1(static_cast<std::uint8_t>(c + 8)), -values[c]);
  }
  EXPECT_TRUE(std::signbit(f32_from_e2m1(8)));
}

TEST(SixteenBits, PublishedVectors) {
  EXPECT_EQ(bf16_from_f32(0.1F), 0x3DCD);
  EXPECT_EQ(bf16_from_f32(3.140625F), 0x4049);
  EXPECT_EQ(bf16_from_f32(1.00390625F), 0x3F80);  // tie, down to even
  EXPECT_EQ(bf16_from_f32(1.01171875F), 0x3F82);  // tie, up to even
  EXPECT_EQ(f16_from_f32(0.1F), 0x2E66);
}

TEST(Specials, SixteenBitFormatsKeepInfinityAndNan) {
  EXPECT_EQ(bf16_from_f32(kInf), 0x7F80);
  EXPECT_EQ(bf16_from_f32(-kInf), 0xFF80);
  EXPECT_EQ(bf16_from_f32(std::numeric_limits<float>::max()), 0x7F80);  // past the last midpoint
  EXPECT_EQ(f16_from_f32(kInf), 0x7C00);
  EXPECT_EQ(f16_from_f32(-65520.0F), 0xFC00);  // tie between 65504 and "65536", even is infinity
  EXPECT_EQ(f16_from_f32(65519.996F), 0x7BFF);
  EXPECT_EQ(f16_from_f32(1e30F), 0x7C00);
  // A NaN whose payload sits only in the bits that are cut must not become infinity.
  const float low_nan = std::bit_cast<float>(0x7F800001U);
  for (const float x : {kNan, low_nan}) {
    EXPECT_TRUE(std::isnan(f32_from_bf16(bf16_from_f32(x))));
    EXPECT_TRUE(std::isnan(f32_from_f16(f16_from_f32(x))));
    EXPECT_NE(bf16_from_f32(x) & 0x0040, 0) << "quiet";
    EXPECT_NE(f16_from_f32(x) & 0x0200, 0) << "quiet";
  }
}

TEST(Specials, NarrowFormatsSaturateAndNanIsPlusLargest) {
  EXPECT_EQ(e4m3_from_f32(kInf), 0x7E);
  EXPECT_EQ(e4m3_from_f32(-kInf), 0xFE);
  EXPECT_EQ(e2m1_from_f32(-kInf), 0xF);
  for (const float nan : {kNan, -kNan, std::bit_cast<float>(0x7F800001U)}) {
    EXPECT_EQ(e4m3_from_f32(nan), 0x7E);
    EXPECT_EQ(e2m1_from_f32(nan), 0x7);
  }
}

TEST(Specials, SignOfZeroIsKept) {
  EXPECT_EQ(bf16_from_f32(-0.0F), 0x8000);
  EXPECT_EQ(f16_from_f32(-1e-30F), 0x8000);
  EXPECT_EQ(e4m3_from_f32(-1e-30F), 0x80);
  EXPECT_EQ(e2m1_from_f32(-0.1F), 0x8);
}

// decode(code) is the value of the definition, encode(decode(code)) is the code (encode may be
// nullptr: a format that is read alone), and values grow with the code: for all codes of both signs.
template <class Decode, class Encode>
void check_all_codes(const Format& f, const Decode& decode, const Encode& encode) {
  SCOPED_TRACE(f.name);
  const std::uint32_t sign = 1U << (f.exponent_bits + f.mantissa_bits);
  double previous = -1;
  for (std::uint32_t code = 0; code <= f.max_code; ++code) {
    const double want = value_of_code(f, code);
    ASSERT_EQ(static_cast<double>(decode(code)), want) << code;
    ASSERT_EQ(static_cast<double>(decode(code | sign)), -want) << code;
    ASSERT_EQ(std::signbit(decode(code | sign)), true) << code;
    if constexpr (!std::is_null_pointer_v<Encode>) {
      ASSERT_EQ(encode(decode(code)), code);
      ASSERT_EQ(encode(decode(code | sign)), code | sign);
    }
    ASSERT_GT(want, previous);
    previous = want;
  }
  // What follows the largest finite code: infinity (if the format has one), then NaN.
  for (std::uint32_t code = f.max_code + 1; code < sign; ++code) {
    const bool infinity = f.name != "e4m3" && code == f.max_code + 1;
    ASSERT_EQ(std::isinf(decode(code)), infinity) << code;
    ASSERT_EQ(std::isnan(decode(code)), !infinity) << code;
    ASSERT_EQ(std::isnan(decode(code | sign)), !infinity) << code;
  }
}

TEST(AllCodes, DecodeByDefinitionAndRoundTrip) {
  const auto f = test::formats();
  using U16 = std::uint16_t;
  using U8 = std::uint8_t;
  check_all_codes(
      f[0], [](std::uint32_t c) { return f32_from_bf16(static_cast<U16>(c)); }, bf16_from_f32);
  check_all_codes(
      f[1], [](std::uint32_t c) { return f32_from_f16(static_cast<U16>(c)); }, f16_from_f32);
  check_all_codes(
      f[2], [](std::uint32_t c) { return f32_from_e4m3(static_cast<U8>(c)); }, e4m3_from_f32);
  check_all_codes(
      f[3], [](std::uint32_t c) { return f32_from_e5m2(static_cast<U8>(c)); }, nullptr);
  check_all_codes(
      f[4], [](std::uint32_t c) { return f32_from_e2m1(static_cast<U8>(c)); }, e2m1_from_f32);
}

TEST(AllCodes, FnuzHasOneZeroOneNanAndNoInfinity) {
  const Format e4m3{"e4m3fnuz", 4, 3, 8, 0x7F, true};
  const Format e5m2{"e5m2fnuz", 5, 2, 16, 0x7F, true};
  for (std::uint32_t code = 0; code < 0x80; ++code) {
    const auto c = static_cast<std::uint8_t>(code);
    const auto negative = static_cast<std::uint8_t>(code | 0x80);
    EXPECT_EQ(static_cast<double>(f32_from_e4m3fnuz(c)), value_of_code(e4m3, code));
    EXPECT_EQ(static_cast<double>(f32_from_e5m2fnuz(c)), value_of_code(e5m2, code));
    if (code == 0) {
      EXPECT_TRUE(std::isnan(f32_from_e4m3fnuz(negative)));
      EXPECT_TRUE(std::isnan(f32_from_e5m2fnuz(negative)));
    } else {
      EXPECT_EQ(f32_from_e4m3fnuz(negative), -f32_from_e4m3fnuz(c));
      EXPECT_EQ(f32_from_e5m2fnuz(negative), -f32_from_e5m2fnuz(c));
    }
  }
  EXPECT_EQ(f32_from_e4m3fnuz(0x7F), 240.0F);
  EXPECT_EQ(f32_from_e5m2fnuz(0x7F), 57344.0F);
}

}  // namespace
}  // namespace moesaic
