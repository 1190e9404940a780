// The packed layout: every piece of a matrix has a place of its own, for every kind, order and odd
// size, and there is zero where the matrix has nothing.
#include "cpu/packed_weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "numerics/element.h"
#include "support/random.h"

namespace moesaic::cpu {
namespace {

struct Case {
  WeightKind kind;
  RowOrder order;
  std::int64_t rows, k;
};

const Case kCases[] = {
    {WeightKind::kF32, RowOrder::kPlain, 64, 128},
    {WeightKind::kF32, RowOrder::kGateUp, 10, 7},
    {WeightKind::kBF16, RowOrder::kPlain, 65, 33},
    {WeightKind::kBF16, RowOrder::kGateUp, 192, 130},
    {WeightKind::kF16, RowOrder::kPlain, 1, 1},
    {WeightKind::kE4M3, RowOrder::kPlain, 100, 257},
    {WeightKind::kE4M3, RowOrder::kGateUp, 66, 5},
    {WeightKind::kI8, RowOrder::kPlain, 70, 100},
    {WeightKind::kI8Quads, RowOrder::kGateUp, 66, 101},
    {WeightKind::kCode4, RowOrder::kGateUp, 66, 34},
    {WeightKind::kInt4Fp8, RowOrder::kPlain, 70, 130},
    {WeightKind::kI4Quads, RowOrder::kPlain, 70, 130},
    {WeightKind::kE2M1Quads, RowOrder::kGateUp, 66, 130},
};

// Pieces that packing moves: nibbles of 4-bit codes, bytes of all else.
std::vector<int> pieces_of(const std::byte* bytes, std::int64_t count, bool nibbles) {
  std::vector<int> pieces;
  for (std::int64_t i = 0; i < count; ++i) {
    const int byte = std::to_integer<int>(bytes[i]);
    if (nibbles) pieces.push_back(byte & 15);
    pieces.push_back(nibbles ? byte >> 4 : byte);
  }
  return pieces;
}
std::vector<int> packed_pieces(const PackedShape& shape, const std::vector<std::byte>& matrix,
                               bool nibbles) {
  WeightBuffer packed = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
  test::poison(packed.data(), packed.bytes());
  pack_matrix(shape, matrix.data(), packed.data(), 2);
  return pieces_of(packed.data(), packed.bytes(), nibbles);
}

// Where pieces go is read off matrices whose pieces have one bit of their number each.
TEST(PackedWeights, EveryPieceHasAPlaceOfItsOwn) {
  test::Rng rng(1);
  for (const Case& c : kCases) {
    const bool code4 = PackedShape{c.kind, c.order, 2, 8}.elem_bits() == 4;
    const PackedShape shape{c.kind, c.order, c.rows, c.k, code4 ? 32 : 4, 0};
    ASSERT_TRUE(check_packed_shape(shape, 1).ok());
    const auto bytes = static_cast<std::size_t>(c.rows * c.k * shape.elem_bits() / 8);
    std::vector<std::byte> matrix(bytes);
    for (std::byte& b : matrix) b = static_cast<std::byte>(rng.next());
    const std::vector<int> want = pieces_of(matrix.data(), static_cast<std::int64_t>(bytes), code4);
    const std::vector<int> got = packed_pieces(shape, matrix, code4);
    std::vector<std::size_t> number(got.size());  // of the piece at a place, from 1
    for (std::size_t bit = 0; (want.size() >> bit) != 0; ++bit) {
      std::vector<std::byte> numbered(bytes);
      for (std::size_t i = 0; i < want.size(); ++i) {
        const auto has = static_cast<int>((i + 1) >> bit & 1);
        if (code4) {
          numbered[i / 2] |= static_cast<std::byte>(has << (i % 2 * 4));
        } else {
          numbered[i] = static_cast<std::byte>(has);
        }
      }
      const std::vector<int> bits = packed_pieces(shape, numbered, code4);
      for (std::size_t i = 0; i < bits.size(); ++i) {
        number[i] |= static_cast<std::size_t>(bits[i]) << bit;
      }
    }
    std::vector<bool> seen(want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const std::size_t n = number[i];
      if (n == 0) {
        ASSERT_EQ(got[i], 0) << "not of the matrix";
        continue;
      }
      ASSERT_LE(n, want.size());
      ASSERT_EQ(got[i], want[n - 1]) << c.rows << " x " << c.k;
      ASSERT_FALSE(seen[n - 1]) << "twice";
      seen[n - 1] = true;
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), true), static_cast<std::ptrdiff_t>(seen.size()));
  }
}

// Written out once by hand: column 1 of a plain e4m3 panel, steps 0..3, sits at bytes 2, 3, 10, 11
// of its 16.
TEST(PackedWeights, EightBitStepsLieWhereTheDecodersLook) {
  const PackedShape shape{WeightKind::kE4M3, RowOrder::kPlain, 64, 4};
  std::vector<std::uint8_t> matrix(64 * 4, 0);
  for (std::uint8_t k = 0; k < 4; ++k)
    matrix[1 * 4 + k] = static_cast<std::uint8_t>(0x11 * (k + 1));
  WeightBuffer packed = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
  pack_matrix(shape, reinterpret_cast<const std::byte*>(matrix.data()), packed.data(), 1);
  const auto* p = reinterpret_cast<const std::uint8_t*>(packed.data());
  EXPECT_EQ(p[2], 0x11);
  EXPECT_EQ(p[3], 0x22);
  EXPECT_EQ(p[10], 0x33);
  EXPECT_EQ(p[11], 0x44);
}

TEST(PackedWeights, GateAndUpMeetInOnePanel) {
  const PackedShape shape{WeightKind::kBF16, RowOrder::kGateUp, 2 * 40, 8};
  EXPECT_EQ(shape.num_panels(), 2);
  EXPECT_EQ(shape.source_row(0, 0), 0);
  EXPECT_EQ(shape.source_row(0, 32), 40);
  EXPECT_EQ(shape.source_row(1, 7), 39);
  EXPECT_EQ(shape.source_row(1, 8), -1);
  EXPECT_EQ(shape.source_row(1, 39), 79);
}

TEST(PackedWeights, BlockScalesFollowTheirRows) {
  // w13 of I = 128: block row 0 is gate, block row 1 is up.
  const PackedShape shape{WeightKind::kE4M3, RowOrder::kGateUp, 256, 256};
  const float scales[4] = {1, 2, 3, 4};  // [2, 2]
  std::vector<float> packed(static_cast<std::size_t>(shape.num_panels() * shape.num_groups() * 4));
  pack_block_scales(shape, scales, 2, packed.data());
  for (std::size_t p = 0; p < 4; ++p) {
    const float* g0 = &packed[p * 8];
    const float* g1 = g0 + 4;
    EXPECT_EQ(std::vector<float>(g0, g0 + 4), (std::vector<float>{1, 1, 3, 3}));
    EXPECT_EQ(std::vector<float>(g1, g1 + 4), (std::vector<float>{2, 2, 4, 4}));
  }
}

// I = 160, K = 200: gate and up have two block rows each, of which the second is a part of one.
TEST(PackedWeights, RaggedBlocksAreCountedWithinGateAndUp) {
  const PackedShape shape{WeightKind::kE4M3, RowOrder::kGateUp, 320, 200};
  const float scales[8] = {1, 2, 3, 4, 5, 6, 7, 8};  // [4, 2]
  std::vector<float> packed(static_cast<std::size_t>(shape.num_panels() * shape.num_groups() * 4));
  ASSERT_EQ(shape.num_groups(), 2);
  ASSERT_EQ(shape.num_panels(), 5);  // 32 channels each
  pack_block_scales(shape, scales, 2, packed.data());
  for (std::size_t p = 0; p < 5; ++p) {
    const float* g0 = &packed[p * 8];
    const bool second = p == 4;  // channels 128 .. 159
    EXPECT_EQ(std::vector<float>(g0, g0 + 4),
              (second ? std::vector<float>{3, 3, 7, 7} : std::vector<float>{1, 1, 5, 5}));
    EXPECT_EQ(std::vector<float>(g0 + 4, g0 + 8),
              (second ? std::vector<float>{4, 4, 8, 8} : std::vector<float>{2, 2, 6, 6}));
  }
}

// Unsigned codes become two's complement on the way in, and padding stays the code of 0.
TEST(PackedWeights, FlippingTurnsUnsignedCodesAround) {
  const PackedShape shape{WeightKind::kI8, RowOrder::kPlain, 1, 2, 16, 0x80};
  const std::byte matrix[2] = {std::byte{0x80}, std::byte{0x83}};
  WeightBuffer packed = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
  test::poison(packed.data(), packed.bytes());
  pack_matrix(shape, matrix, packed.data(), 1);
  EXPECT_EQ(packed.data()[0], std::byte{0});
  EXPECT_EQ(packed.data()[1], std::byte{3});
  for (std::int64_t i = 2; i < packed.bytes(); ++i) ASSERT_EQ(packed.data()[i], std::byte{0});
}

// Blocks of 2 rows, counted within gate and within up: 3 rows each make two blocks each.
TEST(PackedWeights, ScalesOfBlocksAreCountedWithinGateAndUp) {
  const PackedShape shape{WeightKind::kE4M3, RowOrder::kGateUp, 6, 24, 16, 0};
  float scale[8];  // [4, 2]
  for (int i = 0; i < 8; ++i) scale[i] = static_cast<float>(10 + i);
  const ConstTensorView scales(reinterpret_cast<const std::byte*>(scale), DType::kF32, {4, 2});
  std::vector<float> got(2 * 64);
  pack_group_scales(shape, 16, {2, 16}, GroupScaleForm::kF32, scales,
                    reinterpret_cast<std::byte*>(got.data()));
  const float want[2][6] = {{10, 10, 12, 14, 14, 16}, {11, 11, 13, 15, 15, 17}};
  for (int group = 0; group < 2; ++group) {
    for (int row = 0; row < 6; ++row) {
      const int column = row < 3 ? row : 32 + row - 3;
      EXPECT_EQ(got[static_cast<std::size_t>(group * 64 + column)], want[group][row])
          << group << " " << row;
    }
  }
}

// Scales that are numbers of 16 bits are held as such; others are named.
TEST(PackedWeights, GroupScalesOf16BitsAreExactOrNamed) {
  const PackedShape shape{WeightKind::kCode4, RowOrder::kPlain, 2, 16, 8, 0};
  float scale[4] = {0.75F, -0x1p-24F, 65504.0F, std::numeric_limits<float>::quiet_NaN()};  // [2, 2]
  const ConstTensorView scales(reinterpret_cast<const std::byte*>(scale), DType::kF32, {2, 2});
  std::vector<std::byte> got(2 * 64 * 2);
  const auto pack = [&](GroupScaleForm form) {
    return pack_group_scales(shape, 8, {1, 8}, form, scales, got.data());
  };
  const auto at = [&](DType dtype, int group, int column) {
    return load_as_f32(got.data(), dtype, group * 64 + column);
  };
  EXPECT_EQ(pack(GroupScaleForm::kF16), -1);
  EXPECT_EQ(at(DType::kF16, 0, 0), 0.75F);
  EXPECT_EQ(at(DType::kF16, 1, 0), -0x1p-24F);
  EXPECT_EQ(at(DType::kF16, 0, 1), 65504.0F);
  EXPECT_TRUE(std::isnan(at(DType::kF16, 1, 1)));
  EXPECT_EQ(at(DType::kF16, 1, 2), 1.0F);  // padding
  EXPECT_EQ(pack(GroupScaleForm::kBF16), 2);
  scale[2] = 0x1p-120F;
  EXPECT_EQ(pack(GroupScaleForm::kBF16), -1);
  EXPECT_EQ(at(DType::kBF16, 0, 1), 0x1p-120F);
  EXPECT_EQ(pack(GroupScaleForm::kF16), 2);
}

// Columns of 8 elements, folds of 4: two groups per scale; zero points, minima and the bias of
// unsigned codes end in one offset.
TEST(PackedWeights, GroupScalesAndOffsets) {
  const PackedShape shape{WeightKind::kCode4, RowOrder::kPlain, 2, 12, 4, 0x08};
  const float scale[4] = {1, 2, 3, 4};  // [2, 2]
  const std::uint8_t zero[4] = {8, 7, 9, 0};
  const float min[4] = {10, 20, 30, 40};
  const auto view = [](const auto* data, DType dtype) {
    return ConstTensorView(reinterpret_cast<const std::byte*>(data), dtype, {2, 2});
  };
  const auto scales = view(scale, DType::kF32);
  std::vector<float> got(3 * 64);
  pack_group_scales(shape, 4, {1, 8}, GroupScaleForm::kF32, scales,
                    reinterpret_cast<std::byte*>(got.data()));
  const auto at = [&](int group, int column) {
    return got[static_cast<std::size_t>(group * 64 + column)];
  };
  EXPECT_EQ(at(0, 0), 1);
  EXPECT_EQ(at(1, 0), 1);
  EXPECT_EQ(at(2, 0), 2);
  EXPECT_EQ(at(2, 1), 4);
  EXPECT_EQ(at(2, 2), 1);  // padding
  pack_group_offsets(shape, 4, 8, scales, view(zero, DType::kU8), {}, 8, got.data());
  EXPECT_EQ(at(0, 0), 0);
  EXPECT_EQ(at(2, 0), -2);
  EXPECT_EQ(at(0, 1), 3);
  EXPECT_EQ(at(2, 1), -32);
  EXPECT_EQ(at(0, 2), 0);
  pack_group_offsets(shape, 4, 8, scales, {}, view(min, DType::kF32), 8, got.data());
  EXPECT_EQ(at(0, 0), 10 - 8);
  EXPECT_EQ(at(2, 1), 40 - 32);
  pack_group_offsets(shape, 4, 8, scales, {}, {}, 8, got.data());
  EXPECT_EQ(at(2, 1), -32);
}

TEST(PackedWeights, RefusesSizesThatDoNotFitAndOddHalves) {
  EXPECT_EQ(
      check_packed_shape({WeightKind::kBF16, RowOrder::kPlain, std::int64_t{1} << 40, 1 << 20}, 1)
          .code(),
      StatusCode::kLimitExceeded);
  EXPECT_EQ(
      check_packed_shape({WeightKind::kBF16, RowOrder::kPlain, 1 << 20, 1 << 20}, 1 << 20).code(),
      StatusCode::kLimitExceeded);
  EXPECT_EQ(check_packed_shape({WeightKind::kBF16, RowOrder::kGateUp, 7, 8}, 1).code(),
            StatusCode::kInvalidShape);
}

}  // namespace
}  // namespace moesaic::cpu
