#include "numerics/element.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>

#include "numerics/codec.h"

namespace moesaic {
namespace {

TEST(Element, StoresRoundOnceAndLoadsWiden) {
  std::array<unsigned char, 64> memory{};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    ASSERT_TRUE(is_storable_float(dtype));
    memory.fill(0xFF);
    store_from_f32(memory.data(), dtype, 3, 0.1F);
    const float want = dtype == DType::kF32    ? 0.1F
                       : dtype == DType::kBF16 ? f32_from_bf16(0x3DCD)
                                               : f32_from_f16(0x2E66);
    EXPECT_EQ(load_as_f32(memory.data(), dtype, 3), want);
    // Neighbours are untouched.
    EXPECT_TRUE(std::isnan(load_as_f32(memory.data(), dtype, 2)));
    EXPECT_TRUE(std::isnan(load_as_f32(memory.data(), dtype, 4)));
  }
}

TEST(Element, LoadsEveryFloatingFormat) {
  const unsigned char bytes[] = {0x00, 0x38, 0x72, 0x80};
  EXPECT_EQ(load_as_f32(bytes, DType::kF8E4M3, 1), 1.0F);
  EXPECT_EQ(load_as_f32(bytes, DType::kF8E5M2, 1), 0.5F);
  EXPECT_EQ(load_as_f32(bytes, DType::kF8E4M3Fnuz, 1), 0.5F);
  EXPECT_EQ(load_as_f32(bytes, DType::kF8E5M2Fnuz, 1), 0.25F);
  EXPECT_TRUE(std::isnan(load_as_f32(bytes, DType::kF8E4M3Fnuz, 3)));
  EXPECT_EQ(load_as_f32(bytes, DType::kF8E8M0, 2), std::ldexp(1.0F, 0x72 - 127));
  EXPECT_EQ(load_as_f32(bytes, DType::kF4E2M1, 4), 1.0F);  // low nibble of 0x72
  EXPECT_EQ(load_as_f32(bytes, DType::kF4E2M1, 5), 6.0F);
  const double d = 0.1;
  EXPECT_EQ(load_as_f32(&d, DType::kF64, 0), 0.1F);
  EXPECT_FALSE(is_loadable_float(DType::kI32));
  EXPECT_FALSE(is_loadable_float(DType::kF6E2M3));
  EXPECT_FALSE(is_storable_float(DType::kF64));
}

TEST(Element, LoadsAreIndifferentToAlignment) {
  std::array<unsigned char, 9> memory{};
  const float x = 1.25F;
  std::memcpy(memory.data() + 1, &x, sizeof x);
  EXPECT_EQ(load_as_f32(memory.data() + 1, DType::kF32, 0), x);
}

}  // namespace
}  // namespace moesaic
