#include "numerics/integer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "numerics/e8m0.h"
#include "numerics/float_codec.h"

namespace moesaic {
namespace {

TEST(Int8, RoundsToEvenAndSaturates) {
  const std::pair<float, int> vectors[] = {
      {0.5F, 0},       {1.5F, 2},       {2.5F, 2},     {-0.5F, 0},
      {-1.5F, -2},     {126.5F, 126},   {127.5F, 127}, {128.0F, 127},
      {-128.5F, -128}, {-129.0F, -128}, {1e30F, 127},  {0.49999997F, 0},
  };
  for (const auto& [x, want] : vectors) EXPECT_EQ(i8_from_f32(x), want) << x;
  EXPECT_EQ(i8_from_f32(std::numeric_limits<float>::quiet_NaN()), 0);
  EXPECT_EQ(i8_from_f32(-std::numeric_limits<float>::infinity()), -128);
  for (int i = -128 * 64; i <= 127 * 64; ++i) {
    const float x = static_cast<float>(i) / 64.0F;
    ASSERT_EQ(i8_from_f32(x), std::nearbyint(x)) << x;
  }
}

TEST(Nibbles, LowFirstAndNeighboursStay) {
  std::vector<std::uint8_t> packed(4, 0xFF);
  for (int i = 0; i < 8; ++i) set_nibble(packed.data(), i, static_cast<std::uint8_t>(i + 1));
  EXPECT_EQ(packed, (std::vector<std::uint8_t>{0x21, 0x43, 0x65, 0x87}));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(nibble_at(packed.data(), i), i + 1);
  set_nibble(packed.data(), 3, 0xFA);  // only the low four bits count
  EXPECT_EQ(packed[1], 0xA3);
}

TEST(Nibbles, Meanings) {
  for (int v = -8; v <= 7; ++v) EXPECT_EQ(i4_from_nibble(static_cast<std::uint8_t>(v & 15)), v);
  EXPECT_EQ(i4_from_nibble(0xF8), -8);  // the low four bits alone
}

TEST(Mxfp4, PublishedBytes) {
  const auto pack = [](const std::vector<float>& values, std::uint8_t e) {
    std::vector<std::uint8_t> bytes(values.size() / 2);
    for (std::size_t i = 0; i < values.size(); ++i) {
      set_nibble(bytes.data(), static_cast<std::int64_t>(i),
                 e2m1_from_f32(values[i] / f32_from_e8m0(e)));
    }
    return bytes;
  };
  EXPECT_EQ(pack({0, 0.5F, -1, 1.5F, 2, -3, 4, 6}, 127),
            (std::vector<std::uint8_t>{0x10, 0x3A, 0xD4, 0x76}));
  const auto bytes = pack({0.3F, -0.9F, 2.6F, -5.2F}, 126);
  EXPECT_EQ(bytes, (std::vector<std::uint8_t>{0xC1, 0xF7}));
  const float want[] = {0.25F, -1.0F, 3.0F, -3.0F};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(f32_from_e2m1(nibble_at(bytes.data(), i)) * f32_from_e8m0(126), want[i]);
  }
}

TEST(Nf4, PublishedCodesAndRoundTrip) {
  const float values[] = {0.5F, -1.0F, 0.25F, 2.0F};
  const int want[] = {10, 2, 9, 15};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(nf4_from_f32(values[i] / 2.0F), want[i]);
  for (std::uint8_t c = 0; c < 16; ++c) {
    EXPECT_EQ(nf4_from_f32(kNf4Values[c]), c);
    if (c > 0) {
      EXPECT_GT(kNf4Values[c], kNf4Values[c - 1U]);
    }
  }
  // Midpoint of entries 14 and 15 exactly: the lower one; just above: the upper one.
  EXPECT_EQ(nf4_from_f32(-5.0F), 0);
  EXPECT_EQ(nf4_from_f32(5.0F), 15);
  EXPECT_EQ(nf4_from_f32(kNf4Values[8] / 2.0F), 7);
  EXPECT_EQ(nf4_from_f32(std::nextafter(kNf4Values[8] / 2.0F, 1.0F)), 8);
}

TEST(Iq4Nl, EntriesAreExactInBf16AndGiveTheirCodes) {
  for (std::uint8_t c = 0; c < 16; ++c) {
    EXPECT_EQ(iq4nl_from_entry(kIq4NlValues[c]), c);
    const auto value = static_cast<float>(kIq4NlValues[c]);
    EXPECT_EQ(f32_from_bf16(bf16_from_f32(value)), value);
    if (c > 0) {
      EXPECT_GT(kIq4NlValues[c], kIq4NlValues[c - 1]);
    }
  }
}

}  // namespace
}  // namespace moesaic
