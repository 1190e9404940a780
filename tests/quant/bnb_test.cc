#include "quant/bnb.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "numerics/codec.h"
#include "quant/code_values.h"
#include "support/refusal.h"
#include "tensors.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::f32_of;
using test::poisoned;

struct Bnb4 {
  Tensor packed, absmax;
};
Bnb4 quantize(const Tensor& x, CodeTable table, std::int64_t block) {
  const std::int64_t n = x.shape().num_elements().value();
  Bnb4 r{poisoned(DType::kU8, {(n + 1) / 2}), poisoned(DType::kF32, {(n + block - 1) / block})};
  const Status s = quant::quantize_bnb4(x.view(), table, block, r.packed.view(), r.absmax.view());
  EXPECT_TRUE(s.ok()) << s.message();
  return r;
}
Tensor dequantize(const Bnb4& r, CodeTable table, std::int64_t block, const Shape& shape) {
  Tensor out = poisoned(DType::kF32, shape);
  const auto values = quant::bnb_values(table);
  for (std::int64_t i = 0; i < shape.num_elements().value(); ++i) {
    const int byte = r.packed.as<std::uint8_t>()[i / 2];
    const auto code = static_cast<std::size_t>(i % 2 == 0 ? byte >> 4 : byte & 15);
    out.as<float>()[i] = values[code] * r.absmax.as<float>()[i / block];
  }
  return out;
}

TEST(Bnb, PublishedBytes) {
  const Tensor x = f32_of({4}, {0.5F, -1.0F, 0.25F, 2.0F});
  const Bnb4 r = quantize(x, CodeTable::kNf4, 64);
  EXPECT_EQ(r.absmax.as<float>()[0], 2.0F);
  EXPECT_EQ(test::bytes_of(r.packed), (std::vector<std::uint8_t>{0xA2, 0x9F}));
}

TEST(Bnb, EveryCodeOfBothTables) {
  for (const CodeTable table : {CodeTable::kNf4, CodeTable::kFp4}) {
    const auto values = quant::bnb_values(table);
    for (std::uint8_t c = 0; c < 16; ++c) {
      EXPECT_EQ(quant::bnb_encode(table, values[c]), c) << int{c};
    }
    // Nearest entry for a fine grid of inputs.
    for (int i = -1000; i <= 1000; ++i) {
      const float x = static_cast<float>(i) * 1e-3F + 1e-5F;
      float best = 2.0F;
      for (const float v : values) best = std::min(best, std::abs(v - x));
      EXPECT_LE(std::abs(values[quant::bnb_encode(table, x)] - x), best * 1.00001F) << x;
    }
  }
  EXPECT_EQ(quant::bnb_encode(CodeTable::kNf4, NAN), 7);
  EXPECT_EQ(quant::bnb_encode(CodeTable::kFp4, NAN), 0);
}

// What bitsandbytes' kernels multiply with, and what its files hold: twelfths of 1/16, 8, 12, 4, 6, 2
// and 3, rounded once.
TEST(Bnb, BitsOfTheFp4Table) {
  const std::uint32_t fp4[] = {0x00000000, 0x3BAAAAAB, 0x3F2AAAAB, 0x3F800000,
                               0x3EAAAAAB, 0x3F000000, 0x3E2AAAAB, 0x3E800000};
  const auto values = quant::bnb_values(CodeTable::kFp4);
  OperandQuant weight;
  weight.dtype = DType::kU4;
  weight.table = CodeTable::kFp4;
  const quant::CodeValues decoded = quant::code_values(weight);
  for (std::size_t c = 0; c < 8; ++c) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(values[c]), fp4[c]) << c;
    EXPECT_EQ(std::bit_cast<std::uint32_t>(values[c + 8]), fp4[c] | 0x80000000U) << c;
  }
  for (std::size_t c = 0; c < 16; ++c) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(decoded[c]), std::bit_cast<std::uint32_t>(values[c]))
        << c;
  }
}

TEST(Bnb, ErrorOnNormalDataAndBlocksAcrossRows) {
  const Tensor x = test::gaussian();
  const Bnb4 r = quantize(x, CodeTable::kNf4, 64);
  const Tensor back = dequantize(r, CodeTable::kNf4, 64, x.shape());
  EXPECT_NEAR(test::rel_l2(back, x) / 0.0919, 1.0, 0.02);
  // A decoded block encodes to itself: its absmax is +-1 of the table.
  std::string why;
  EXPECT_TRUE(
      test::same_bits(quantize(back, CodeTable::kNf4, 64).packed.view(), r.packed.view(), &why))
      << why;
  // Rows of 37 columns: the second block of 64 begins inside row 1. An odd number of elements.
  test::Rng rng(5);
  const Tensor odd = test::random_normal(rng, DType::kF32, {5, 37});
  const Bnb4 o = quantize(odd, CodeTable::kFp4, 64);
  ASSERT_EQ(o.absmax.shape(), Shape({3}));
  float amax = 0;
  for (int i = 64; i < 128; ++i) amax = std::max(amax, std::abs(odd.as<float>()[i]));
  EXPECT_EQ(o.absmax.as<float>()[1], amax);
  EXPECT_EQ(o.packed.as<std::uint8_t>()[92] & 15, 0);
  EXPECT_LT(test::rel_l2(dequantize(o, CodeTable::kFp4, 64, {5, 37}), odd), 0.2);
  // Zeros.
  const Tensor zero = Tensor::zeros(DType::kF32, {64}).value();
  EXPECT_EQ(test::to_doubles(
                dequantize(quantize(zero, CodeTable::kNf4, 64), CodeTable::kNf4, 64, {64}).view()),
            std::vector<double>(64, 0.0));
}

TEST(Bnb, NestedAbsmaxAndOrderOfNibbles) {
  std::vector<float> map(256);
  for (std::size_t i = 0; i < 256; ++i) map[i] = (static_cast<float>(i) - 127.0F) / 128.0F;
  const Tensor codes = test::tensor_of<std::uint8_t>(DType::kU8, {5}, {0, 127, 255, 1, 254});
  Tensor absmax = poisoned(DType::kF32, {5});
  ASSERT_TRUE(quant::expand_nested_absmax(codes.view(), f32_of({256}, map).view(),
                                          f32_of({3}, {2.0F, 0.5F, 4.0F}).view(), 2, 0.25F,
                                          absmax.view())
                  .ok());
  for (std::size_t i = 0; i < 5; ++i) {
    const float nested[] = {2.0F, 2.0F, 0.5F, 0.5F, 4.0F};
    EXPECT_EQ(absmax.as<float>()[i], map[codes.as<std::uint8_t>()[i]] * nested[i] + 0.25F);
  }
  Tensor bytes = test::tensor_of<std::uint8_t>(DType::kU8, {2}, {0xA2, 0x9F});
  ASSERT_TRUE(quant::swap_nibbles(bytes.view(), bytes.view()).ok());
  EXPECT_EQ(test::bytes_of(bytes), (std::vector<std::uint8_t>{0x2A, 0xF9}));
}

TEST(Bnb, Misuse) {
  const Tensor x = f32_of({64}, {});
  Tensor packed = Tensor::zeros(DType::kU8, {32}).value();
  Tensor absmax = Tensor::zeros(DType::kF32, {1}).value();
  for (const std::int64_t bad : {16, 48, 8192}) {
    expect_refusal(
        quant::quantize_bnb4(x.view(), CodeTable::kNf4, bad, packed.view(), absmax.view()),
        StatusCode::kInvalidArgument, {"block_size", "power of two"});
  }
  expect_refusal(quant::quantize_bnb4(x.view(), CodeTable::kNf4, 32, packed.view(), absmax.view()),
                 StatusCode::kInvalidShape, {"absmax", "[1]", "[2]"});
  expect_refusal(quant::expand_nested_absmax(packed.view(), f32_of({255}, {}).view(), absmax.view(),
                                             256, 0.0F, f32_of({32}, {}).view()),
                 StatusCode::kInvalidShape, {"map", "[255]", "[256]"});
}

}  // namespace
}  // namespace moesaic
