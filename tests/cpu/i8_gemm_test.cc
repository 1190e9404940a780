// The integer GEMMs of rows of int8 codes against the fp32 ones, whose bits they promise.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "available_tiers.h"
#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "numerics/codec.h"
#include "poisoned_result.h"
#include "support/random.h"

namespace moesaic::cpu {
namespace {

struct FoldCase {
  int bits;  // of the weights; 6: against the kernel of 8
  int fold;
  bool column_scales, row_scales, offsets;
  bool e2m1 = false;
};
constexpr FoldCase kFoldCases[] = {
    {8, 128, false, false, false},  // W8A8 of whole rows
    {8, 128, true, true, false},       {8, 32, true, true, true},
    {8, 16, true, false, false},       {6, 128, true, true, false},
    {6, 32, true, true, true},         {6, 16, true, false, false},
    {4, 128, true, true, false},       {4, 64, true, true, true},
    {4, 32, true, true, true},         {4, 16, true, false, false},
    {4, 128, false, true, false},      {4, 128, true, true, false, true},
    {4, 32, true, true, false, true},  {4, 16, true, true, false, true},
    {4, 32, false, true, false, true},
};

CodeTable4 two_s_complement() {
  std::array<float, 16> values{};
  for (int code = 0; code < 16; ++code)
    values[static_cast<std::size_t>(code)] = static_cast<float>(code < 8 ? code : code - 16);
  return make_code_table(values);
}

CodeTable4 e2m1() {
  std::array<float, 16> values{};
  for (std::uint8_t code = 0; code < 16; ++code) values[code] = f32_from_e2m1(code);
  return make_code_table(values);
}

// Every code of either side, the ends most often: their sums come nearest to 2^24.
int any_code(test::Rng& rng) {
  const std::int64_t which = rng.integer(0, 3);
  if (which == 0) return -128;
  if (which == 1) return 127;
  return static_cast<int>(rng.integer(-128, 127));
}

WeightBuffer packed(const PackedShape& shape, const std::vector<std::byte>& matrix) {
  WeightBuffer buffer = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
  pack_matrix(shape, matrix.data(), buffer.data(), 1);
  return buffer;
}

std::vector<float> factors(test::Rng& rng, std::int64_t count) {
  std::vector<float> v(static_cast<std::size_t>(count));
  for (float& x : v) x = static_cast<float>(rng.normal());
  return v;
}

// Drawn, or all the same.
struct Codes {
  bool constant = false;
  int row = 0, code = 0, code4 = 0;
};

void compare(const CpuKernels& k, const FoldCase& c, std::int64_t depth, const Codes& drawn) {
  test::Rng rng(static_cast<std::uint64_t>(depth * c.fold));
  const bool four = c.bits == 4;
  const WeightKind kind = four ? WeightKind::kCode4 : WeightKind::kI8;
  const bool six = c.bits == 6;
  const WeightKind quads = c.e2m1 ? WeightKind::kE2M1Quads
                           : four ? WeightKind::kI4Quads
                           : six  ? WeightKind::kI6Quads
                                  : WeightKind::kI8Quads;
  const CodeTable4 codes = c.e2m1 ? e2m1() : two_s_complement();
  const PackedShape plain{kind, RowOrder::kPlain, kPanelColumns, depth, c.fold, 0};
  PackedShape integer{quads, RowOrder::kPlain, kPanelColumns, depth, c.fold};
  integer.code_flip = static_cast<std::uint8_t>(c.e2m1 ? 0
                                                : four ? kDotBias4
                                                : six  ? kDotBias6
                                                       : kDotBias);
  std::vector<std::byte> matrix(static_cast<std::size_t>(depth * kPanelColumns / (four ? 2 : 1)));
  for (std::byte& b : matrix) {
    const int any = any_code(rng);
    const int code = !drawn.constant ? any : four ? drawn.code4 * 0x11 : drawn.code;
    b = static_cast<std::byte>(six ? code >> 2 : code);
  }
  const WeightBuffer plain_panel = packed(plain, matrix), integer_panel = packed(integer, matrix);
  const std::int64_t padded = plain.padded_k(), groups = padded / c.fold;
  const std::vector<float> scales = factors(rng, groups * kPanelColumns);
  const std::vector<float> offsets = factors(rng, groups * kPanelColumns);
  const std::vector<float> row_scales = factors(rng, kMaxRows * groups);
  const std::vector<float> row_sums = factors(rng, kMaxRows * groups);

  std::vector<float> values(static_cast<std::size_t>(kMaxRows * padded), 0.0F);
  const auto row_bytes = static_cast<std::size_t>(dot_row_bytes(padded, c.fold));
  std::vector<std::byte> stored(kMaxRows * row_bytes);
  std::vector<const void*> plain_rows, integer_rows;
  std::vector<const float*> scale_rows, sum_rows;
  for (std::size_t r = 0; r < kMaxRows; ++r) {
    float* row = &values[r * static_cast<std::size_t>(padded)];
    for (std::int64_t i = 0; i < depth; ++i) {
      row[i] = static_cast<float>(drawn.constant ? drawn.row : any_code(rng));
    }
    k.store_i8(row, padded, c.fold, &stored[r * row_bytes]);
    plain_rows.push_back(row);
    integer_rows.push_back(&stored[r * row_bytes]);
    scale_rows.push_back(&row_scales[r * static_cast<std::size_t>(groups)]);
    sum_rows.push_back(&row_sums[r * static_cast<std::size_t>(groups)]);
  }

  PanelArgs args;
  args.fold = c.fold;
  args.codes = &codes;
  args.padded_k = padded;
  if (c.column_scales) {
    args.group_scales = reinterpret_cast<const std::byte*>(scales.data());
    args.group_scale_form = GroupScaleForm::kF32;
  }
  if (c.row_scales) args.row_scales = scale_rows.data();
  if (c.offsets) args.group_offsets = offsets.data(), args.row_sums = sum_rows.data();
  for (const int rows : {1, 2, 3, 4, 5, 6, 7, 11, 13, 32, 96}) {
    args.num_rows = rows;
    Tensor want = poisoned_result(), got = poisoned_result();
    args.panel = plain_panel.data();
    args.rows = plain_rows.data();
    args.result = want.as<float>();
    k.grouped_gemm_f32[kind](args);
    args.panel = integer_panel.data();
    args.rows = integer_rows.data();
    args.result = got.as<float>();
    k.grouped_gemm_i8[quads](args);
    EXPECT_EQ(std::memcmp(want.data(), got.data(), sizeof(float) * kMaxRows * kPanelColumns), 0)
        << k.name << (c.e2m1 ? " e2m1 " : " bits ") << c.bits << " fold " << c.fold << " K "
        << depth << " rows " << rows;
    EXPECT_NE(want.as<float>()[0], 0.0F);
  }
}

TEST(I8Gemm, HasTheBitsOfTheFp32Kernel) {
  int tested = 0;
  for (const CpuKernels* k : tiers()) {
    ASSERT_EQ(k->store_i8 == nullptr, k->grouped_gemm_i8[WeightKind::kI8Quads] == nullptr);
    ASSERT_EQ(k->store_i8 == nullptr, k->grouped_gemm_i8[WeightKind::kI6Quads] == nullptr);
    ASSERT_EQ(k->store_i8 == nullptr, k->grouped_gemm_i8[WeightKind::kI4Quads] == nullptr);
    ASSERT_EQ(k->store_i8 == nullptr, k->grouped_gemm_i8[WeightKind::kE2M1Quads] == nullptr);
    if (k->store_i8 == nullptr) continue;
    ++tested;
    for (const FoldCase& c : kFoldCases) {
      // Tiles add up more than a group where no scale comes between: tile_gemm_test.cc.
      if (std::string_view(k->name) == "amx" && !c.column_scales && !c.row_scales) continue;
      // A group or less, a part of one, and beyond 2^24 in all.
      for (const std::int64_t depth : {12, 128, 400, 2304}) compare(*k, c, depth, {});
      // Nothing passes the 16 bits of byte pairs.
      for (const int row : {-128, 127}) {
        for (const bool most : {false, true}) {
          compare(*k, c, 400,
                  {.constant = true, .row = row, .code = most ? 127 : -128, .code4 = most ? 7 : 9});
        }
      }
    }
  }
  if (tested == 0) GTEST_SKIP() << "no tier here has the integer kernel (AVX2, AVX512_VNNI)";
}

}  // namespace
}  // namespace moesaic::cpu
