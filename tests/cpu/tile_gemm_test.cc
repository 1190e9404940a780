// The GEMMs on tile registers beyond what every tier promises (panel_gemm_test.cc): a row's bits
// depend on nothing but the row, integer sums are exact, and the instructions do what their model
// says.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "cpu/tile_model_kernels.h"
#include "numerics/codec.h"
#include "poisoned_result.h"
#include "support/random.h"

namespace moesaic::cpu {
namespace {

// On this machine's tile registers, and on the model of them.
std::vector<const CpuKernels*> tile_tiers() {
  std::vector<const CpuKernels*> list;
  for (const CpuKernels* k : tiers_and_model()) {
    if (std::string_view(k->name).starts_with("amx")) list.push_back(k);
  }
  return list;
}

#define REQUIRE_TILES() \
  if (tile_tiers().empty()) GTEST_SKIP() << "no AVX512_BF16, which the rest of the tier needs"

struct Format {
  WeightKind kind;
  int fold;  // 0: the plain GEMM
  bool scales, row_scales, offsets;
};
constexpr Format kFormats[] = {
    {WeightKind::kBF16, 0, false, false, false},
    {WeightKind::kBF16, 0, true, true, false},
    {WeightKind::kE4M3, 0, false, false, false},
    {WeightKind::kE4M3, 0, true, true, false},
    {WeightKind::kE4M3, 32, true, false, false},
    {WeightKind::kCode4, 128, true, false, true},
    {WeightKind::kCode4, 16, true, false, false},
    {WeightKind::kCode4, 32, true, true, false},
    {WeightKind::kI8, 128, false, false, false},
    {WeightKind::kI8, 64, true, true, true},
    {WeightKind::kI8Quads, 128, false, false, false},
    {WeightKind::kI8Quads, 128, true, true, false},
    {WeightKind::kI8Quads, 64, true, true, true},
    {WeightKind::kI8Quads, 32, true, true, false},
    {WeightKind::kI4Quads, 128, true, true, true},
    {WeightKind::kI4Quads, 128, false, false, false},
};

bool integers(const Format& f) {
  return f.kind == WeightKind::kI8Quads || f.kind == WeightKind::kI4Quads;
}

// One panel, its scales and kMaxRows rows, drawn anew from the same seed by everyone who asks.
struct Problem {
  Problem(const CpuKernels& k, const Format& f, std::int64_t depth) : format(f) {
    test::Rng rng(static_cast<std::uint64_t>(depth * 100 + f.fold));
    PackedShape shape{f.kind, RowOrder::kPlain, kPanelColumns, depth, f.fold > 0 ? f.fold : 4};
    if (f.kind == WeightKind::kI8Quads) shape.code_flip = kDotBias;
    if (f.kind == WeightKind::kI4Quads) shape.code_flip = kDotBias4;
    matrix.resize(static_cast<std::size_t>(depth * kPanelColumns * shape.elem_bits() / 8));
    for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = weight(rng, i);
    panel = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
    pack_matrix(shape, matrix.data(), panel.data(), 1);
    padded = shape.padded_k();
    const std::int64_t step = f.fold > 0 ? f.fold : kGroup;
    groups = (padded + step - 1) / step;
    const auto numbers = [&](std::int64_t n) {
      std::vector<float> v(static_cast<std::size_t>(n));
      for (float& x : v) x = static_cast<float>(rng.normal());
      return v;
    };
    scales = numbers(groups * kPanelColumns);
    offsets = numbers(groups * kPanelColumns);
    row_scales = numbers(kMaxRows * groups);
    row_sums = numbers(kMaxRows * groups);
    values.resize(static_cast<std::size_t>(kMaxRows * padded));
    row_bytes = integers(f) ? dot_row_bytes(padded, f.fold) : 2 * padded;
    stored.resize(static_cast<std::size_t>(kMaxRows * row_bytes));
    for (std::int64_t r = 0; r < kMaxRows; ++r) {
      float* row = &values[static_cast<std::size_t>(r * padded)];
      std::byte* out = &stored[static_cast<std::size_t>(r * row_bytes)];
      // Every third row is so small that many products and sums are subnormal.
      const float size = r % 3 == 1 ? 0x1p-125F : 1.0F;
      for (std::int64_t i = 0; i < depth; ++i) {
        row[i] =
            integers(f) ? static_cast<float>(code(rng)) : size * static_cast<float>(rng.normal());
      }
      if (integers(f)) {
        k.store_i8(row, padded, f.fold, out);
      } else {
        for (std::int64_t i = 0; i < padded; ++i) {
          const std::uint16_t bits = bf16_from_f32(row[i]);
          std::memcpy(out + 2 * i, &bits, 2);
        }
      }
    }
    std::array<float, 16> table{};
    for (std::uint8_t c = 0; c < 16; ++c) table[c] = static_cast<float>(i4_from_nibble(c));
    codes = make_code_table(table);
  }
  // Every code, the ends of the range most often.
  static int code(test::Rng& rng) {
    const std::int64_t which = rng.integer(0, 3);
    return which == 0 ? -128 : which == 1 ? 127 : static_cast<int>(rng.integer(-128, 127));
  }
  std::byte weight(test::Rng& rng, std::size_t i) const {
    if (format.kind == WeightKind::kBF16) {  // pairs of bytes
      if (i % 2 == 0) pending = bf16_from_f32(static_cast<float>(rng.normal()));
      return static_cast<std::byte>(i % 2 == 0 ? pending & 0xFFU : pending >> 8);
    }
    const auto any = static_cast<std::uint8_t>(integers(format) ? code(rng) : rng.integer(0, 255));
    const bool nan = format.kind == WeightKind::kE4M3 && (any & 0x7FU) == 0x7FU;
    return static_cast<std::byte>(nan ? 0 : any);
  }

  // Of the rows `order`, apart by a copy of their own or as they lie.
  Tensor run(const CpuKernels& k, const std::vector<int>& order) const {
    std::vector<const void*> rows;
    std::vector<const float*> scale_rows, sum_rows;
    for (const int r : order) {
      rows.push_back(&stored[static_cast<std::size_t>(r * row_bytes)]);
      scale_rows.push_back(&row_scales[static_cast<std::size_t>(r * groups)]);
      sum_rows.push_back(&row_sums[static_cast<std::size_t>(r * groups)]);
    }
    Tensor result = poisoned_result();
    PanelArgs args;
    args.panel = panel.data();
    args.rows = rows.data();
    args.num_rows = static_cast<int>(order.size());
    args.padded_k = padded;
    args.result = result.as<float>();
    args.codes = &codes;
    if (format.row_scales) args.row_scales = scale_rows.data();
    if (format.fold == 0) {
      if (format.scales) args.panel_scales = scales.data();
      k.panel_gemm_bf16[format.kind](args);
      return result;
    }
    args.fold = format.fold;
    if (format.scales) {
      args.group_scales = reinterpret_cast<const std::byte*>(scales.data());
      args.group_scale_form = GroupScaleForm::kF32;
    }
    if (format.offsets) args.group_offsets = offsets.data(), args.row_sums = sum_rows.data();
    (integers(format) ? k.grouped_gemm_i8 : k.grouped_gemm_bf16)[format.kind](args);
    return result;
  }

  Format format;
  mutable std::uint16_t pending = 0;
  std::vector<std::byte> matrix, stored;
  WeightBuffer panel;
  std::vector<float> scales, offsets, row_scales, row_sums, values;
  std::int64_t padded = 0, groups = 0, row_bytes = 0;
  CodeTable4 codes;
};

constexpr std::size_t kRowFloats = kPanelColumns * sizeof(float);
// Without scales a block is up to 1024 steps deep.
std::vector<std::int64_t> depths(const Format& f) {
  std::vector<std::int64_t> all = {4, 130, 300, 520};
  if (!f.scales && !f.offsets && !f.row_scales) all.push_back(1300);
  return all;
}

std::int64_t real_depth(const Format& f, std::int64_t depth) {
  return f.kind == WeightKind::kCode4 || f.kind == WeightKind::kI4Quads ? round_up(depth, 2)
                                                                        : depth;
}

TEST(TileGemm, ARowsBitsDependOnNothingButTheRow) {
  REQUIRE_TILES();
  std::vector<int> all(kMaxRows);
  for (int r = 0; r < kMaxRows; ++r) all[static_cast<std::size_t>(r)] = r;
  for (const CpuKernels* k : tile_tiers()) {
    for (const Format& f : kFormats) {
      for (const std::int64_t depth : depths(f)) {
        const Problem p(*k, f, real_depth(f, depth));
        const Tensor want = p.run(*k, all);
        for (const int count : {1, 2, 3, 6, 7, 17, 33, 50, 95}) {
          // Neighbours in order, which tiles load where they lie, and others, which are copied.
          for (const int stride : {1, 7}) {
            std::vector<int> order;
            for (int i = 0; i < count; ++i) {
              order.push_back((i * stride + 3) % kMaxRows);
            }
            const Tensor got = p.run(*k, order);
            for (int i = 0; i < count; ++i) {
              ASSERT_EQ(
                  std::memcmp(got.as<float>() + i * kPanelColumns,
                              want.as<float>() + order[static_cast<std::size_t>(i)] * kPanelColumns,
                              kRowFloats),
                  0)
                  << k->name << " kind " << static_cast<int>(f.kind) << " fold " << f.fold << " K "
                  << depth << " rows " << count << " row " << i;
            }
          }
        }
      }
    }
  }
}

TEST(TileGemm, RowsBeyondTheCallAreLeftAlone) {
  REQUIRE_TILES();
  for (const CpuKernels* k : tile_tiers()) {
    const Problem p(*k, kFormats[0], 160);
    const Tensor untouched = poisoned_result();
    for (const int count : {1, 15, 17, 33, 95}) {
      std::vector<int> order;
      for (int r = 0; r < count; ++r) order.push_back(r);
      const Tensor got = p.run(*k, order);
      EXPECT_EQ(std::memcmp(got.as<float>() + count * kPanelColumns,
                            untouched.as<float>() + count * kPanelColumns,
                            static_cast<std::size_t>(kMaxRows - count) * kRowFloats),
                0)
          << k->name << " rows " << count;
    }
  }
}

// Without scales sums are integers to their end, whichever rows share a tile, and rounded once.
TEST(TileGemm, IntegerSumsWithoutScalesAreRoundedOnce) {
  REQUIRE_TILES();
  for (const CpuKernels* k : tile_tiers()) {
    const std::int64_t depth = 2304;
    const Problem p(*k, kFormats[10], depth);
    for (const int rows : {4, 18, 35}) {
      std::vector<int> order;
      for (int r = 0; r < rows; ++r) order.push_back(r);
      const Tensor got = p.run(*k, order);
      double largest = 0;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < kPanelColumns; ++c) {
          std::int64_t sum = 0;
          for (std::int64_t i = 0; i < depth; ++i) {
            const auto at = static_cast<std::size_t>(c * depth + i);
            sum += static_cast<std::int8_t>(p.matrix[at]) *
                   static_cast<int>(p.values[static_cast<std::size_t>(r * p.padded + i)]);
          }
          ASSERT_EQ(got.as<float>()[r * kPanelColumns + c], static_cast<float>(sum))
              << k->name << " row " << r << " of " << rows;
          largest = std::max(largest, std::fabs(static_cast<double>(sum)));
        }
      }
      EXPECT_GT(largest, 5e4);
    }
  }
}

// Groups with scales: the same integers and the same fold as on the 8-bit dot product.
TEST(TileGemm, IntegerGroupsHaveTheBitsOfTheDotProduct) {
  REQUIRE_TILES();
  const CpuKernels& dot = *kernels_by_name("avx512_bf16").value();
  std::vector<int> order;
  for (int r = 0; r < 45; ++r) order.push_back(r);
  for (const CpuKernels* k : tile_tiers()) {
    for (const Format& f : kFormats) {
      if (!integers(f) || !f.scales) continue;
      const Problem p(*k, f, 640);
      const Tensor want = p.run(dot, order), got = p.run(*k, order);
      EXPECT_EQ(std::memcmp(want.data(), got.data(), order.size() * kRowFloats), 0)
          << k->name << " kind " << static_cast<int>(f.kind) << " fold " << f.fold;
    }
  }
}

TEST(TileGemm, TheProcessorDoesWhatTheModelSays) {
  const auto amx = kernels_by_name("amx");
  if (!amx.ok()) GTEST_SKIP() << amx.status().message();
  std::vector<int> order;
  for (int r = 0; r < 45; ++r) order.push_back((r * 5) % kMaxRows);
  for (const Format& f : kFormats) {
    for (const std::int64_t depth : depths(f)) {
      const Problem p(**amx, f, real_depth(f, depth));
      const Tensor want = p.run(*kernels_amx_model(), order), got = p.run(**amx, order);
      EXPECT_EQ(std::memcmp(want.data(), got.data(), order.size() * kRowFloats), 0)
          << "kind " << static_cast<int>(f.kind) << " fold " << f.fold << " K " << depth;
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu
