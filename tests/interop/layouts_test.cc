#include "moesaic/interop/layouts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "numerics/codec.h"
#include "quant/tensors.h"
#include "support/fp8_rows.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::poisoned;

Tensor random_bytes(test::Rng& rng, DType dtype, const Shape& shape, int below = 255) {
  Tensor t = Tensor::zeros(dtype, shape).value();
  for (std::int64_t i = 0; i < t.bytes(); ++i) {
    t.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(rng.integer(0, below - 1));
  }
  return t;
}

// --- 128x4 swizzle -------------------------------------------------------------------------------

TEST(Swizzle, PublishedOffsets) {
  struct Row {
    std::int64_t m, k, offset;
  };
  for (const Row& r :
       {Row{0, 0, 0}, Row{1, 0, 16}, Row{31, 3, 499}, Row{32, 0, 4}, Row{33, 1, 21},
        Row{127, 3, 511}, Row{0, 4, 512}, Row{5, 7, 595}, Row{128, 0, 1024}, Row{200, 6, 1674}}) {
    EXPECT_EQ(swizzle_offset(r.m, r.k, 2), r.offset) << r.m << ' ' << r.k;
  }
  // Equivalent: reshape [mt, 4, 32, kt, 4], permute to [mt, kt, 32, 4, 4].
  std::vector<bool> seen(256 * 12);
  for (std::int64_t m = 0; m < 256; ++m) {
    for (std::int64_t k = 0; k < 12; ++k) {
      const std::int64_t want =
          ((((m / 128) * 3 + k / 4) * 32 + m % 32) * 4 + m / 32 % 4) * 4 + k % 4;
      ASSERT_EQ(swizzle_offset(m, k, 3), want);
      ASSERT_FALSE(seen[static_cast<std::size_t>(want)]);
      seen[static_cast<std::size_t>(want)] = true;
    }
  }
}

TEST(Swizzle, RoundTripOnAnySize) {
  test::Rng rng(1);
  std::string why;
  for (int round = 0; round < 40; ++round) {
    const bool stacked = round % 2 == 0;
    const std::int64_t m = rng.integer(0, 300), k = rng.integer(0, 13), e = rng.integer(0, 3);
    const Shape shape = stacked ? Shape({e, m, k}) : Shape({m, k});
    const Tensor scales = random_bytes(rng, DType::kF8E4M3, shape);
    Tensor swizzled = poisoned(DType::kF8E4M3, swizzled_shape(shape).value());
    ASSERT_TRUE(swizzle_block_scales(scales.view(), swizzled.view()).ok());
    // Same multiset of bytes but for zero padding.
    const auto sum = [](const Tensor& t) {
      std::int64_t s = 0;
      for (const std::uint8_t b : test::bytes_of(t)) s += b;
      return s;
    };
    EXPECT_EQ(sum(swizzled), sum(scales));
    if (!stacked) {
      for (std::int64_t i = 0; i < m * k; ++i) {
        ASSERT_EQ(swizzled.as<std::uint8_t>()[swizzle_offset(i / k, i % k, (k + 3) / 4)],
                  scales.as<std::uint8_t>()[i]);
      }
    }
    Tensor back = poisoned(DType::kF8E4M3, shape);
    ASSERT_TRUE(unswizzle_block_scales(swizzled.view(), back.view()).ok());
    EXPECT_TRUE(test::same_bits(back.view(), scales.view(), &why)) << why;
  }
}

TEST(Swizzle, OffsetsOfGroupedRows) {
  const Tensor rows = test::tensor_of<std::int32_t>(DType::kI32, {4}, {1, 0, 129, 128});
  Tensor first = poisoned(DType::kI32, {5});
  ASSERT_TRUE(block_scale_offsets(rows.view(), first.view()).ok());
  EXPECT_EQ(test::to_doubles(first.view()), (std::vector<double>{0, 128, 128, 384, 512}));
}

// --- DeepGEMM scales -----------------------------------------------------------------------------

TEST(ScaleLayouts, PublishedWords) {
  const Tensor scales = test::f32_of({1, 5}, {0x1p-7F, 0x1p-8F, 1, 2, 0x1p-3F});
  const Shape shape = packed_ue8m0_shape(scales.shape()).value();
  EXPECT_EQ(shape, Shape({2, 4}));
  Tensor packed = poisoned(DType::kI32, shape);
  ASSERT_TRUE(pack_ue8m0(scales.view(), packed.view()).ok());
  EXPECT_EQ(packed.as<std::uint32_t>()[0], 0x807F7778U);
  EXPECT_EQ(packed.as<std::uint32_t>()[4], 0x0000007CU);
  for (const int padded : {1, 2, 3, 5, 6, 7}) EXPECT_EQ(packed.as<std::uint32_t>()[padded], 0U);
  // M = 5, G = 6: two columns of 8 words; the byte of (4, 5) is at offset 49.
  std::vector<std::uint8_t> bytes(30, 127);
  bytes[4 * 6 + 5] = 99;
  const Tensor exponents = test::tensor_of(DType::kF8E8M0, {5, 6}, bytes);
  Tensor words = poisoned(DType::kI32, packed_ue8m0_shape({5, 6}).value());
  EXPECT_EQ(words.shape(), Shape({2, 8}));
  ASSERT_TRUE(pack_ue8m0(exponents.view(), words.view()).ok());
  EXPECT_EQ(words.as<std::uint8_t>()[49], 99);
  EXPECT_EQ(tma_aligned_rows(5, 4), 8);
  EXPECT_EQ(tma_aligned_rows(5, 1), 16);
}

TEST(ScaleLayouts, RoundTripOnAnySize) {
  test::Rng rng(2);
  std::string why;
  for (int round = 0; round < 40; ++round) {
    const std::int64_t e = rng.integer(0, 3), m = rng.integer(0, 11), g = rng.integer(0, 11);
    const Shape shape = round % 2 == 0 ? Shape({e, m, g}) : Shape({m, g});
    Tensor f32 = Tensor::zeros(DType::kF32, shape).value();
    Tensor bytes = Tensor::zeros(DType::kU8, shape).value();
    for (std::int64_t i = 0; i < bytes.bytes(); ++i) {
      const int exponent = static_cast<int>(rng.integer(1, 254));
      bytes.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(exponent);
      f32.as<float>()[i] = std::ldexp(1.0F, exponent - 127);
    }
    const Shape packed_shape = packed_ue8m0_shape(shape).value();
    Tensor from_f32 = poisoned(DType::kI32, packed_shape);
    Tensor from_bytes = poisoned(DType::kI32, packed_shape);
    ASSERT_TRUE(pack_ue8m0(f32.view(), from_f32.view()).ok());
    ASSERT_TRUE(pack_ue8m0(bytes.view(), from_bytes.view()).ok());
    EXPECT_TRUE(test::same_bits(from_f32.view(), from_bytes.view(), &why)) << why;
    Tensor back_f32 = poisoned(DType::kF32, shape);
    Tensor back_bytes = poisoned(DType::kU8, shape);
    ASSERT_TRUE(unpack_ue8m0(from_f32.view(), back_f32.view()).ok());
    ASSERT_TRUE(unpack_ue8m0(from_f32.view(), back_bytes.view()).ok());
    EXPECT_TRUE(test::same_bits(back_f32.view(), f32.view(), &why)) << why;
    EXPECT_TRUE(test::same_bits(back_bytes.view(), bytes.view(), &why)) << why;

    Tensor columns = poisoned(DType::kF32, column_major_shape(shape).value());
    ASSERT_TRUE(to_column_major(f32.view(), columns.view()).ok());
    test::poison(back_f32.view());
    ASSERT_TRUE(from_column_major(columns.view(), back_f32.view()).ok());
    EXPECT_TRUE(test::same_bits(back_f32.view(), f32.view(), &why)) << why;

    const std::int64_t block = rng.integer(1, 5);
    const std::int64_t blocks = (m + block - 1) / block;
    const Shape block_shape = round % 2 == 0 ? Shape({e, blocks, g}) : Shape({blocks, g});
    const Tensor coarse = random_bytes(rng, DType::kF8E8M0, block_shape);
    Tensor rows = poisoned(DType::kF8E8M0, shape);
    ASSERT_TRUE(expand_row_blocks(coarse.view(), block, rows.view()).ok());
    Tensor again = poisoned(DType::kF8E8M0, block_shape);
    ASSERT_TRUE(collapse_row_blocks(rows.view(), block, again.view()).ok());
    EXPECT_TRUE(test::same_bits(again.view(), coarse.view(), &why)) << why;
  }
}

// What the quantiser of activations makes, group by group of a row, and in columns padded to 8 rows.
TEST(ScaleLayouts, TakesScalesOfTheGroupQuantiser) {
  test::Rng rng(3);
  const Tensor x = test::random_normal(rng, DType::kBF16, {5, 512});
  const test::Fp8Rows rows = test::fp8_rows(x, quant::ScaleRounding::kCeilPowerOfTwo);
  Tensor relaid = poisoned(DType::kF32, column_major_shape({5, 4}).value());
  ASSERT_TRUE(to_column_major(rows.scales.view(), relaid.view()).ok());
  ASSERT_EQ(relaid.shape(), Shape({4, 8}));
  for (int m = 0; m < 8; ++m) {
    for (int g = 0; g < 4; ++g) {
      const float want = m < 5 ? rows.scales.as<float>()[m * 4 + g] : 0.0F;
      EXPECT_EQ(relaid.as<float>()[g * 8 + m], want) << m << ' ' << g;
    }
  }
  // And UE8M0 scales pack without loss.
  Tensor packed = poisoned(DType::kI32, packed_ue8m0_shape({5, 4}).value());
  EXPECT_TRUE(pack_ue8m0(rows.scales.view(), packed.view()).ok());
}

// --- Marlin --------------------------------------------------------------------------------------

TEST(Marlin, PublishedPermutations) {
  const auto perm = marlin_permutation(4);
  const int first[] = {0, 128, 8, 136, 16, 144, 24, 152, 256, 384, 264, 392, 272, 400, 280, 408};
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(perm[i], first[i]) << i;
  const int later[] = {32, 160, 40, 168, 48, 176, 56, 184};
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(perm[32 + i], later[i]) << i;
  for (const int bits : {4, 8}) {
    auto sorted = marlin_permutation(bits);
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t i = 0; i < 1024; ++i) ASSERT_EQ(sorted[i], static_cast<int>(i));
  }
  const auto grouped = marlin_group_scale_permutation();
  const int group_want[] = {0, 8, 16, 24, 32, 40, 48, 56, 1, 9};
  for (std::size_t i = 0; i < 10; ++i) EXPECT_EQ(grouped[i], group_want[i]) << i;
  const auto single = marlin_channel_scale_permutation();
  const int single_want[] = {0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11};
  for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(single[i], single_want[i]) << i;
}

TEST(Marlin, PackingFollowsTheDefinition) {
  test::Rng rng(4);
  for (const int bits : {4, 8}) {
    const std::int64_t n = 192, k = 48;
    const Tensor codes = random_bytes(rng, DType::kU8, {n, k}, 1 << bits);
    // The definition, step by step: [K, N] -> [K/16, N/16, 16, 16] -> chunks of 1024 -> perm ->
    // pack.
    std::vector<std::uint8_t> tiles;
    for (std::int64_t kt = 0; kt < k / 16; ++kt) {
      for (std::int64_t nt = 0; nt < n / 16; ++nt) {
        for (std::int64_t i = 0; i < 256; ++i) {
          tiles.push_back(codes.as<std::uint8_t>()[(nt * 16 + i % 16) * k + kt * 16 + i / 16]);
        }
      }
    }
    const auto perm = marlin_permutation(bits);
    const std::size_t per_word = 32 / static_cast<std::size_t>(bits);
    std::vector<std::uint32_t> want(tiles.size() / per_word);
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      const std::size_t from = i / 1024 * 1024 + static_cast<std::size_t>(perm[i % 1024]);
      want[i / per_word] |= static_cast<std::uint32_t>(tiles[from])
                            << (static_cast<std::size_t>(bits) * (i % per_word));
    }
    Tensor packed = poisoned(DType::kI32, {k / 16, n / 2 * bits});
    ASSERT_TRUE(pack_marlin_weight(codes.view(), bits, packed.view()).ok());
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(packed.as<std::uint32_t>()[i], want[i]) << i;
    }
    Tensor back = poisoned(DType::kU8, {n, k});
    ASSERT_TRUE(unpack_marlin_weight(packed.view(), bits, back.view()).ok());
    std::string why;
    EXPECT_TRUE(test::same_bits(back.view(), codes.view(), &why)) << why;

    const Tensor zeros = random_bytes(rng, DType::kU8, {n, 3}, 1 << bits);
    Tensor packed_zeros = poisoned(DType::kI32, {3, n / 32 * bits});
    ASSERT_TRUE(pack_marlin_zeros(zeros.view(), bits, packed_zeros.view()).ok());
    Tensor zeros_back = poisoned(DType::kU8, {n, 3});
    ASSERT_TRUE(unpack_marlin_zeros(packed_zeros.view(), bits, zeros_back.view()).ok());
    EXPECT_TRUE(test::same_bits(zeros_back.view(), zeros.view(), &why)) << why;
    // Zero of column 0 is first; place 1 of a 4-bit word holds what place 2 of the scales' order
    // holds, column 16.
    const std::uint32_t mask = (1U << bits) - 1U;
    EXPECT_EQ(packed_zeros.as<std::uint32_t>()[0] & mask, zeros.as<std::uint8_t>()[0]);
    EXPECT_EQ(packed_zeros.as<std::uint32_t>()[0] >> bits & mask, zeros.as<std::uint8_t>()[16 * 3]);
  }
}

TEST(Marlin, ScalesMoveAndComeBack) {
  test::Rng rng(5);
  std::string why;
  for (const bool grouped : {true, false}) {
    const Tensor scales = test::random_normal(rng, DType::kF16, {grouped ? 3 : 1, 128});
    Tensor moved = poisoned(DType::kF16, scales.shape());
    ASSERT_TRUE(to_marlin_scales(scales.view(), grouped, moved.view()).ok());
    EXPECT_EQ(moved.as<std::uint16_t>()[2], scales.as<std::uint16_t>()[grouped ? 16 : 8]);
    Tensor back = poisoned(DType::kF16, scales.shape());
    ASSERT_TRUE(from_marlin_scales(moved.view(), grouped, back.view()).ok());
    EXPECT_TRUE(test::same_bits(back.view(), scales.view(), &why)) << why;
  }
}

// --- MMA order -----------------------------------------------------------------------------------

TEST(Int4Mma, EveryElementOnceAndBack) {
  std::vector<int> seen(64 * 32);
  for (std::int64_t t = 0; t < 128; ++t) {
    for (std::int64_t i = 0; i < 16; ++i) {
      const Int4MmaElement at = int4_mma_element(t, i);
      ++seen[static_cast<std::size_t>(at.row * 32 + at.col)];
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), 64 * 32);
  // Thread 5 of warp 2: rows 33 and 41, columns 4..7 and 20..23.
  EXPECT_EQ(int4_mma_element(69, 0).row, 33);
  EXPECT_EQ(int4_mma_element(69, 0).col, 4);
  EXPECT_EQ(int4_mma_element(69, 5).row, 41);
  EXPECT_EQ(int4_mma_element(69, 5).col, 5);
  EXPECT_EQ(int4_mma_element(69, 11).row, 33);
  EXPECT_EQ(int4_mma_element(69, 11).col, 23);

  test::Rng rng(6);
  const Tensor nibbles = random_bytes(rng, DType::kU8, {128, 48}, 256);
  Tensor words = poisoned(DType::kI32, {2, 3, 128, 2});
  ASSERT_TRUE(pack_int4_mma(nibbles.view(), words.view()).ok());
  // Tile (1, 2), thread 69, value 11: row 64 + 33, column 64 + 23.
  const std::int64_t word = ((1 * 3 + 2) * 128 + 69) * 2 + 1;
  EXPECT_EQ(words.as<std::uint32_t>()[word] >> 12 & 15U,
            nibble_at(nibbles.as<std::uint8_t>(), (64 + 33) * 96 + 64 + 23));
  Tensor back = poisoned(DType::kU8, {128, 48});
  ASSERT_TRUE(unpack_int4_mma(words.view(), back.view()).ok());
  std::string why;
  EXPECT_TRUE(test::same_bits(back.view(), nibbles.view(), &why)) << why;
}

TEST(Layouts, Misuse) {
  Tensor scales = Tensor::zeros(DType::kF8E4M3, {5, 3}).value();
  ConstTensorView there = scales.view();
  there.device = Device::cuda(0);
  expect_refusal(swizzle_block_scales(there, poisoned(DType::kU8, {128, 4}).view()),
                 StatusCode::kInvalidArgument, {"got memory of cuda:0, need memory of cpu"});
  expect_refusal(swizzle_block_scales(scales.view(), poisoned(DType::kF8E4M3, {5, 3}).view()),
                 StatusCode::kInvalidShape, {"swizzled", "[5, 3]", "[128, 4]"});
  expect_refusal(swizzle_block_scales(scales.view(), poisoned(DType::kU8, {128, 4}).view()),
                 StatusCode::kInvalidDType, {"swizzled", "U8", "F8_E4M3"});
  const Tensor rows = test::tensor_of<std::int32_t>(DType::kI32, {2}, {3, -1});
  expect_refusal(block_scale_offsets(rows.view(), poisoned(DType::kI32, {3}).view()),
                 StatusCode::kInvalidArgument, {"rows[1]", "-1"});
  // A scale that is no power of two would lose its mantissa.
  Tensor packed = poisoned(DType::kI32, {1, 4});
  for (const float bad : {3.0F, -2.0F, 0.0F, 0x1p-127F}) {
    expect_refusal(pack_ue8m0(test::f32_of({1, 2}, {1.0F, bad}).view(), packed.view()),
                   StatusCode::kInvalidArgument, {"scales[0, 1]", "power of two"});
  }
  const Tensor nan = test::tensor_of<std::uint8_t>(DType::kF8E8M0, {1, 1}, {0xFF});
  expect_refusal(pack_ue8m0(nan.view(), packed.view()), StatusCode::kInvalidArgument,
                 {"scales[0, 0]", "0xFF"});
  // Experts without rows, however many, are nothing to walk over.
  const Shape none{std::int64_t{1} << 55, 0, 4};
  EXPECT_TRUE(
      swizzle_block_scales({nan.data(), DType::kU8, none}, {packed.data(), DType::kU8, none}).ok());
  // Whose bit in a set of 32 is that of U8.
  expect_refusal(pack_ue8m0({nan.data(), static_cast<DType>(36), {1, 1}}, packed.view()),
                 StatusCode::kInvalidDType, {"scales: got unknown"});
  const Tensor uneven = test::f32_of({2, 1}, {1, 2});
  expect_refusal(collapse_row_blocks(uneven.view(), 2, poisoned(DType::kF32, {1, 1}).view()),
                 StatusCode::kInvalidArgument, {"row 1", "block of 2"});
  Tensor codes = Tensor::zeros(DType::kU8, {64, 16}).value();
  Tensor marlin = Tensor::zeros(DType::kI32, {1, 128}).value();
  EXPECT_TRUE(pack_marlin_weight(codes.view(), 4, marlin.view()).ok());
  expect_refusal(pack_marlin_weight(codes.view(), 5, marlin.view()), StatusCode::kInvalidArgument,
                 {"bits", "5"});
  expect_refusal(pack_marlin_weight(poisoned(DType::kU8, {32, 16}).view(), 4, marlin.view()),
                 StatusCode::kInvalidShape, {"N", "32", "64"});
  codes.as<std::uint8_t>()[17] = 16;
  expect_refusal(pack_marlin_weight(codes.view(), 4, marlin.view()), StatusCode::kInvalidArgument,
                 {"codes", "row 1, column 1", "16"});
  expect_refusal(pack_int4_mma(codes.view(), marlin.view()), StatusCode::kInvalidShape,
                 {"words", "[1, 1, 128, 2]"});
  expect_refusal(pack_int4_mma(poisoned(DType::kU8, {63, 16}).view(), marlin.view()),
                 StatusCode::kInvalidShape, {"nibbles", "[63, 16]", "64"});
}

}  // namespace
}  // namespace moesaic
