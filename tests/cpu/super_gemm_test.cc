// The integer GEMM that reads scales of super-blocks as they lie has the bits of the one that reads
// the F32 numbers they stand for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "available_tiers.h"
#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "cpu/super_scales.h"
#include "numerics/codec.h"
#include "poisoned_result.h"
#include "support/random.h"

namespace moesaic::cpu {
namespace {

struct SuperGemmCase {
  WeightKind kind;
  SuperScaleForm form;
  int fold;
  float bias;
  int folds_per_row_scale;
};
constexpr SuperGemmCase kSuperGemmCases[] = {
    {WeightKind::kI6Quads, {8, 16, false}, 16, 0, 1},  // Q6_K
    {WeightKind::kI6Quads, {8, 16, false}, 16, 0, 2},
    {WeightKind::kI4Quads, {6, 32, true}, 32, 0, 1},  // Q4_K
    {WeightKind::kI4Quads, {6, 32, true}, 32, 8, 4},
};

std::vector<float> normal(test::Rng& rng, std::int64_t count) {
  std::vector<float> v(static_cast<std::size_t>(count));
  for (float& x : v) x = static_cast<float>(rng.normal());
  return v;
}

// A panel of super-blocks with every code and finite numbers.
std::vector<std::byte> drawn_blocks(test::Rng& rng, const SuperScaleForm& form, std::int64_t k) {
  std::vector<std::byte> blocks(static_cast<std::size_t>(form.panel_bytes(k)));
  for (std::byte& b : blocks) b = static_cast<std::byte>(rng.integer(0, 255));
  const int units = kPanelColumns * (form.minima ? 2 : 1);
  for (std::size_t at = 0; at < blocks.size(); at += static_cast<std::size_t>(form.block_bytes())) {
    for (int i = 0; i < units; ++i) {
      const std::uint16_t unit = f16_from_f32(static_cast<float>(rng.normal()));
      std::memcpy(&blocks[at + 2 * static_cast<std::size_t>(i)], &unit, sizeof(unit));
    }
  }
  return blocks;
}

void compare_super(const CpuKernels& k, const SuperGemmCase& c, std::int64_t depth) {
  test::Rng rng(static_cast<std::uint64_t>(depth + c.folds_per_row_scale));
  const PackedShape shape{c.kind, RowOrder::kPlain, kPanelColumns, depth, c.fold};
  ASSERT_EQ(shape.padded_k(), depth);
  WeightBuffer panel = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
  std::generate_n(panel.data(), shape.panel_bytes(),
                  [&] { return static_cast<std::byte>(rng.integer(0, 255)); });
  const std::vector<std::byte> blocks = drawn_blocks(rng, c.form, depth);
  const std::int64_t groups = depth / c.fold;
  const auto cells = static_cast<std::size_t>(groups * kPanelColumns);
  std::vector<float> scales(cells), offsets(cells);
  SuperScaleArgs expand;
  expand.form = c.form;
  expand.compact = blocks.data();
  expand.bias = c.bias;
  expand.groups = groups;
  expand.scales = scales.data();
  if (c.form.minima) expand.offsets = offsets.data();
  k.expand_super_scales(expand);

  const auto row_bytes = static_cast<std::size_t>(dot_row_bytes(depth, c.fold));
  const std::vector<float> row_scales = normal(rng, kSuperGemmRows * groups);
  const std::vector<float> row_sums = normal(rng, kSuperGemmRows * groups);
  std::vector<std::byte> stored(kSuperGemmRows * row_bytes);
  std::vector<const void*> rows;
  std::vector<const float*> scale_rows, sum_rows;
  for (std::size_t r = 0; r < kSuperGemmRows; ++r) {
    std::vector<float> row(static_cast<std::size_t>(depth));
    for (float& x : row) x = static_cast<float>(rng.integer(-128, 127));
    k.store_i8(row.data(), depth, c.fold, &stored[r * row_bytes]);
    rows.push_back(&stored[r * row_bytes]);
    scale_rows.push_back(&row_scales[r * static_cast<std::size_t>(groups)]);
    sum_rows.push_back(&row_sums[r * static_cast<std::size_t>(groups)]);
  }

  PanelArgs args;
  args.panel = panel.data();
  args.fold = c.fold;
  args.padded_k = depth;
  args.rows = rows.data();
  args.row_scales = scale_rows.data();
  args.folds_per_row_scale = c.folds_per_row_scale;
  if (c.form.minima) args.row_sums = sum_rows.data();
  for (int count = 1; count <= kSuperGemmRows; ++count) {
    args.num_rows = count;
    Tensor want = poisoned_result(), got = poisoned_result();
    args.result = want.as<float>();
    args.group_scales = reinterpret_cast<const std::byte*>(scales.data());
    args.group_scale_form = GroupScaleForm::kF32;
    args.group_offsets = expand.offsets;
    k.grouped_gemm_i8[c.kind](args);
    args.result = got.as<float>();
    args.group_scales = nullptr;
    args.group_offsets = nullptr;
    args.super = c.form;
    args.super_blocks = blocks.data();
    args.super_bias = c.bias;
    k.super_gemm_i8[c.kind](args);
    EXPECT_EQ(std::memcmp(want.data(), got.data(), sizeof(float) * kMaxRows * kPanelColumns), 0)
        << k.name << " bits " << c.form.bits << " K " << depth << " rows " << count;
    EXPECT_NE(want.as<float>()[0], 0.0F);
  }
}

TEST(SuperGemm, HasTheBitsOfExpandedScales) {
  int tested = 0;
  for (const CpuKernels* k : tiers()) {
    ASSERT_EQ(k->store_i8 == nullptr, k->super_gemm_i8[WeightKind::kI6Quads] == nullptr);
    ASSERT_EQ(k->store_i8 == nullptr, k->super_gemm_i8[WeightKind::kI4Quads] == nullptr);
    if (k->store_i8 == nullptr) continue;
    ++tested;
    for (const SuperGemmCase& c : kSuperGemmCases) {
      ASSERT_TRUE(super_gemm_takes(c.kind, c.form, c.fold));
      // Half a super-block, a part of a half, whole ones and a rest in either half.
      for (const std::int64_t depth : {128, 32, 512, 2144, 2272}) compare_super(*k, c, depth);
    }
  }
  if (tested == 0) GTEST_SKIP() << "no tier here has the integer kernel (AVX2, AVX512_VNNI)";
}

TEST(SuperGemm, TakesWhatItHasKernelsFor) {
  EXPECT_FALSE(super_gemm_takes(WeightKind::kI6Quads, {8, 16, true}, 16));
  EXPECT_FALSE(super_gemm_takes(WeightKind::kI6Quads, {8, 32, false}, 16));
  EXPECT_FALSE(super_gemm_takes(WeightKind::kI4Quads, {6, 16, true}, 16));
  EXPECT_FALSE(super_gemm_takes(WeightKind::kI4Quads, {6, 32, false}, 32));
  EXPECT_FALSE(super_gemm_takes(WeightKind::kI8Quads, {8, 16, false}, 16));
}

}  // namespace
}  // namespace moesaic::cpu
