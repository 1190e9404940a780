#include "quant/int_packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

Tensor bytes_of(const Shape& shape, std::initializer_list<int> values) {
  Tensor t = Tensor::zeros(DType::kU8, shape).value();
  std::size_t i = 0;
  for (const int v : values) t.as<std::uint8_t>()[i++] = static_cast<std::uint8_t>(v);
  return t;
}
Tensor words(const Shape& shape) {
  Tensor t = Tensor::zeros(DType::kI32, shape).value();
  test::poison(t.view());
  return t;
}
Tensor random_codes(test::Rng& rng, const Shape& shape, int bits, int add = 0) {
  Tensor t = Tensor::zeros(DType::kU8, shape).value();
  for (std::int64_t i = 0; i < t.bytes(); ++i) {
    t.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(rng.integer(0, (1 << bits) - 1) + add);
  }
  return t;
}

// The orders of int_packing.h, written bit by bit as their descriptions say.
enum class Order { kGptqWeight, kGptqZeros, kAwq, kCtZeros };
Tensor packed(Order order, const Tensor& codes, int bits, int subtract = 0) {
  const std::int64_t n = codes.shape()[0], k = codes.shape()[1];
  const auto words_of = [&](std::int64_t count) { return (count * bits + 31) / 32; };
  Shape shape = {k, words_of(n)};
  if (order == Order::kGptqWeight) shape = {words_of(k), n};
  if (order == Order::kCtZeros) shape = {words_of(n), k};
  Tensor t = Tensor::zeros(DType::kI32, shape).value();
  constexpr std::array<std::int64_t, 8> kAwqColumns = {0, 2, 4, 6, 1, 3, 5, 7};
  for (std::int64_t i = 0; i < n * k; ++i) {
    const std::int64_t row = i / k, col = i % k;
    for (int b = 0; b < bits; ++b) {
      std::int64_t bit = (order == Order::kGptqWeight ? col : row) * bits + b;
      if (order == Order::kAwq) {
        const auto* nibble = std::find(kAwqColumns.begin(), kAwqColumns.end(), row % 8);
        bit = row / 8 * 32 + (nibble - kAwqColumns.begin()) * 4 + b;
      }
      std::int64_t word = col * shape[1] + bit / 32;
      if (order == Order::kGptqWeight) word = bit / 32 * n + row;
      if (order == Order::kCtZeros) word = bit / 32 * k + col;
      const auto code = static_cast<std::uint32_t>(codes.as<std::uint8_t>()[i] - subtract);
      t.as<std::uint32_t>()[word] |= (code >> b & 1U) << (bit % 32);
    }
  }
  return t;
}

TEST(IntPacking, PublishedWords) {
  // Codes 1 .. 8 along K of one column, and of eight columns.
  std::string why;
  const Tensor along_k = bytes_of({1, 8}, {1, 2, 3, 4, 5, 6, 7, 8});
  const Tensor along_n = bytes_of({8, 1}, {1, 2, 3, 4, 5, 6, 7, 8});
  Tensor word = words({1, 1});
  Tensor row = bytes_of({1, 8}, {}), column = bytes_of({8, 1}, {});
  word.as<std::uint32_t>()[0] = 0x87654321U;
  ASSERT_TRUE(quant::unpack_gptq_weight(word.view(), 4, row.view()).ok());
  EXPECT_TRUE(test::same_bits(row.view(), along_k.view(), &why)) << why;
  word.as<std::uint32_t>()[0] = 0x86427531U;
  ASSERT_TRUE(quant::unpack_awq_weight(word.view(), column.view()).ok());
  EXPECT_TRUE(test::same_bits(column.view(), along_n.view(), &why)) << why;
  test::poison(column.view());
  ASSERT_TRUE(quant::unpack_awq_zeros(word.view(), column.view()).ok());
  EXPECT_TRUE(test::same_bits(column.view(), along_n.view(), &why)) << why;
  // (-8,-7,-1,0,1,2,6,7) and (-128,-1,0,127), stored with their offset.
  ASSERT_TRUE(
      quant::pack_ct_weight(bytes_of({1, 8}, {0, 1, 7, 8, 9, 10, 14, 15}).view(), 4, word.view())
          .ok());
  EXPECT_EQ(word.as<std::uint32_t>()[0], 0xFEA98710U);
  ASSERT_TRUE(
      quant::pack_ct_weight(bytes_of({1, 4}, {0, 127, 128, 255}).view(), 8, word.view()).ok());
  EXPECT_EQ(word.as<std::uint32_t>()[0], 0xFF807F00U);
  // A symmetric GPTQ file: z = 8 is stored as 7, or as 8 by "gptq_v2".
  const Tensor eights = bytes_of({8, 1}, {8, 8, 8, 8, 8, 8, 8, 8});
  for (const auto& [format, stored] : {std::pair{quant::GptqZeroFormat::kMinusOne, 0x77777777U},
                                       std::pair{quant::GptqZeroFormat::kPlain, 0x88888888U}}) {
    word.as<std::uint32_t>()[0] = stored;
    ASSERT_TRUE(quant::unpack_gptq_zeros(word.view(), 4, format, column.view()).ok());
    EXPECT_TRUE(test::same_bits(column.view(), eights.view(), &why)) << why;
  }
}

TEST(IntPacking, StoredZerosReadAsTheZeroPoint) {
  Tensor word = words({1, 1});
  word.as<std::uint32_t>()[0] = 0xF0777777U;
  Tensor zeros = bytes_of({8, 1}, {0, 0, 0, 0, 0, 0, 0, 0});
  ASSERT_TRUE(
      quant::unpack_gptq_zeros(word.view(), 4, quant::GptqZeroFormat::kMinusOne, zeros.view())
          .ok());
  const std::array<int, 8> want = {8, 8, 8, 8, 8, 8, 1, 16};  // 15 + 1 is not cut to four bits
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(zeros.as<std::uint8_t>()[i], want[i]) << i;
  ASSERT_TRUE(
      quant::unpack_gptq_zeros(word.view(), 4, quant::GptqZeroFormat::kPlain, zeros.view()).ok());
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(zeros.as<std::uint8_t>()[i], (0xF0777777U >> (4 * i)) & 15U) << i;
  }
}

// Three bits cross words: 32 codes fill three of them. Word contents from the definition of a dense
// little-endian stream, computed with a 128-bit shift register.
TEST(IntPacking, OddWidthsAreADenseStream) {
  for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8}) {
    test::Rng rng(static_cast<std::uint64_t>(bits));
    constexpr std::int64_t kCodes = 77;
    const Tensor codes = random_codes(rng, {1, kCodes}, bits);
    const std::int64_t count = (kCodes * bits + 31) / 32;
    ASSERT_EQ(quant::words_for_codes(kCodes, bits), count);
    std::vector<std::uint8_t> stream;  // one bit each
    for (std::int64_t i = 0; i < kCodes; ++i) {
      for (int b = 0; b < bits; ++b) {
        stream.push_back(static_cast<std::uint8_t>(codes.as<std::uint8_t>()[i] >> b & 1));
      }
    }
    Tensor packed = words({1, count});
    ASSERT_TRUE(quant::pack_ct_weight(codes.view(), bits, packed.view()).ok());
    for (std::int64_t i = 0; i < count * 32; ++i) {
      const unsigned want =
          i < kCodes * bits ? stream[static_cast<std::size_t>(i)] : 0U;  // unused bits are 0
      ASSERT_EQ(packed.as<std::uint32_t>()[i / 32] >> (i % 32) & 1U, want) << bits << ' ' << i;
    }
  }
}

// Sizes that are no multiple of a word or of the transposing block among them.
TEST(IntPacking, UnpackingUndoesEveryOrder) {
  test::Rng rng(4);
  std::string why;
  for (int round = 0; round < 60; ++round) {
    const std::int64_t n = rng.integer(0, 20) * (round % 2 == 0 ? 1 : 8);
    const std::int64_t k = rng.integer(0, 150);
    const int bits = static_cast<int>(rng.integer(1, 8));
    SCOPED_TRACE("N " + std::to_string(n) + " K " + std::to_string(k) + " bits " +
                 std::to_string(bits));
    const Tensor codes = random_codes(rng, {n, k}, bits);
    Tensor back = Tensor::zeros(DType::kU8, {n, k}).value();
    test::poison(back.view());
    const auto check = [&](const Status& unpacked, const Tensor& want) {
      EXPECT_TRUE(unpacked.ok()) << unpacked.message();
      EXPECT_TRUE(test::same_bits(back.view(), want.view(), &why)) << why;
      test::poison(back.view());
    };
    Tensor row = words({n, quant::words_for_codes(k, bits)});
    ASSERT_TRUE(quant::pack_ct_weight(codes.view(), bits, row.view()).ok());
    check(quant::unpack_ct_weight(row.view(), bits, back.view()), codes);
    check(quant::unpack_ct_zeros(packed(Order::kCtZeros, codes, bits).view(), bits, back.view()),
          codes);
    if (bits == 2 || bits == 3 || bits == 4 || bits == 8) {
      check(quant::unpack_gptq_weight(packed(Order::kGptqWeight, codes, bits).view(), bits,
                                      back.view()),
            codes);
      check(quant::unpack_gptq_zeros(packed(Order::kGptqZeros, codes, bits).view(), bits,
                                     quant::GptqZeroFormat::kPlain, back.view()),
            codes);
    }
    if (bits == 2 || bits == 3 || bits == 4) {
      const Tensor zeros = random_codes(rng, {n, k}, bits, 1);
      check(quant::unpack_gptq_zeros(packed(Order::kGptqZeros, zeros, bits, 1).view(), bits,
                                     quant::GptqZeroFormat::kMinusOne, back.view()),
            zeros);
    }
    if (bits == 4 && n % 8 == 0) {
      const Tensor awq = packed(Order::kAwq, codes, bits);
      check(quant::unpack_awq_weight(awq.view(), back.view()), codes);
      check(quant::unpack_awq_zeros(awq.view(), back.view()), codes);
    }
  }
}

TEST(IntPacking, NibblesAndBias) {
  const Tensor codes = bytes_of({2, 2}, {0, 8, 15, 7});
  Tensor nibbles = bytes_of({2, 1}, {0, 0});
  ASSERT_TRUE(quant::pack_nibbles(codes.view(), 8, nibbles.view()).ok());
  EXPECT_EQ(nibbles.as<std::uint8_t>()[0], 0x08);  // -8, 0
  EXPECT_EQ(nibbles.as<std::uint8_t>()[1], 0xF7);  // 7, -1
  ASSERT_TRUE(quant::pack_nibbles(codes.view(), 0, nibbles.view()).ok());
  EXPECT_EQ(nibbles.as<std::uint8_t>()[0], 0x80);
  EXPECT_EQ(nibbles.as<std::uint8_t>()[1], 0x7F);
  Tensor with_sign = Tensor::zeros(DType::kI8, {2}).value();
  with_sign.as<std::int8_t>()[0] = -8;
  with_sign.as<std::int8_t>()[1] = 7;
  TensorView one(nibbles.data(), DType::kU8, {1});
  ASSERT_TRUE(quant::pack_nibbles(with_sign.view(), 0, one).ok());
  EXPECT_EQ(nibbles.as<std::uint8_t>()[0], 0x78);

  Tensor bytes = bytes_of({4}, {0, 1, 128, 255});
  TensorView values(bytes.data(), DType::kI8, {4});  // in place
  ASSERT_TRUE(quant::subtract_bias(bytes.view(), 128, values).ok());
  EXPECT_EQ(values.as<std::int8_t>()[0], -128);
  EXPECT_EQ(values.as<std::int8_t>()[1], -127);
  EXPECT_EQ(values.as<std::int8_t>()[2], 0);
  EXPECT_EQ(values.as<std::int8_t>()[3], 127);
}

TEST(IntPacking, Misuse) {
  Tensor codes = bytes_of({8, 8}, {});
  Tensor word = words({1, 8});
  expect_refusal(quant::unpack_gptq_weight(word.view(), 5, codes.view()),
                 StatusCode::kInvalidArgument, {"bits", "5", "2, 3, 4 or 8"});
  expect_refusal(quant::unpack_ct_weight(word.view(), 9, codes.view()),
                 StatusCode::kInvalidArgument, {"bits", "9", "1 .. 8"});
  // One word too many or too few.
  Tensor narrow = words({2, 8});
  expect_refusal(quant::unpack_gptq_weight(narrow.view(), 4, codes.view()),
                 StatusCode::kInvalidShape, {"qweight", "[2, 8]", "[1, 8]"});
  expect_refusal(quant::unpack_awq_weight(words({8, 2}).view(), codes.view()),
                 StatusCode::kInvalidShape, {"qweight", "[8, 2]", "[8, 1]"});
  Tensor seven = bytes_of({7, 8}, {});
  expect_refusal(quant::unpack_awq_weight(words({8, 1}).view(), seven.view()),
                 StatusCode::kInvalidShape, {"codes", "7", "multiple of 8"});
  expect_refusal(quant::unpack_gptq_weight(codes.view(), 4, codes.view()),
                 StatusCode::kInvalidDType, {"qweight", "U8", "I32"});
  codes.as<std::uint8_t>()[9] = 16;
  expect_refusal(quant::pack_ct_weight(codes.view(), 4, words({8, 1}).view()),
                 StatusCode::kInvalidArgument, {"codes", "row 1, column 1", "16", "0 .. 15"});
  codes.as<std::uint8_t>()[9] = 0;
  TensorView inside(codes.data(), DType::kI32, {1, 8});
  expect_refusal(quant::unpack_gptq_weight(inside, 4, codes.view()), StatusCode::kAliasing,
                 {"qweight", "codes"});
  Tensor eights = words({1, 1});
  Tensor zeros = bytes_of({4, 1}, {});
  expect_refusal(
      quant::unpack_gptq_zeros(eights.view(), 8, quant::GptqZeroFormat::kMinusOne, zeros.view()),
      StatusCode::kInvalidArgument, {"qzeros", "row 0", "255"});
  Tensor nibbles = bytes_of({8, 4}, {});
  codes.as<std::uint8_t>()[3] = 16;
  expect_refusal(quant::pack_nibbles(codes.view(), 8, nibbles.view()), StatusCode::kInvalidArgument,
                 {"codes", "element 3", "16"});
  expect_refusal(quant::pack_nibbles(codes.view(), 4, nibbles.view()), StatusCode::kInvalidArgument,
                 {"bias", "0 or 8"});
  Tensor odd = bytes_of({8, 7}, {});
  expect_refusal(quant::pack_nibbles(odd.view(), 8, nibbles.view()), StatusCode::kInvalidShape,
                 {"codes", "[8, 7]", "even"});
  TensorView values(codes.data(), DType::kI8, {8, 8});
  codes.as<std::uint8_t>()[3] = 200;
  expect_refusal(quant::subtract_bias(codes.view(), 8, values), StatusCode::kInvalidArgument,
                 {"codes", "element 3", "200", "135"});
}

}  // namespace
}  // namespace moesaic
