// 6-bit codes against the same codes in bytes: every tier's kernels have the same bits.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "available_tiers.h"
#include "cpu/kernels.h"
#include "cpu/packed_weights.h"
#include "cpu/tile_model_kernels.h"
#include "numerics/codec.h"
#include "poisoned_result.h"
#include "support/random.h"

namespace moesaic::cpu {
namespace {

WeightBuffer packed_codes(WeightKind kind, std::int64_t depth, std::int64_t multiple,
                          const std::vector<std::byte>& matrix) {
  const PackedShape shape{kind, RowOrder::kPlain, kPanelColumns, depth, multiple};
  WeightBuffer buffer = std::move(WeightBuffer::allocate(shape.matrix_bytes())).value();
  test::poison(buffer.data(), buffer.bytes());
  pack_matrix(shape, matrix.data(), buffer.data(), 1);
  return buffer;
}

std::vector<float> normal_factors(test::Rng& rng, std::int64_t count) {
  std::vector<float> v(static_cast<std::size_t>(count));
  for (float& x : v) x = static_cast<float>(rng.normal());
  return v;
}

void compare_with_bytes(const CpuKernels& k, int fold, bool scaled, std::int64_t depth) {
  test::Rng rng(static_cast<std::uint64_t>(depth + fold));
  std::vector<std::byte> matrix(static_cast<std::size_t>(depth * kPanelColumns));
  for (std::byte& b : matrix) b = static_cast<std::byte>(rng.integer(-32, 31));
  const WeightBuffer bytes = packed_codes(WeightKind::kI8, depth, fold, matrix);
  const WeightBuffer six = packed_codes(WeightKind::kI6, depth, fold, matrix);
  const std::int64_t padded = (depth + fold - 1) / fold * fold, groups = padded / fold;
  EXPECT_EQ(six.bytes() * 8, padded * kPanelColumns * 6);
  const std::vector<float> scales = normal_factors(rng, groups * kPanelColumns);
  const std::vector<float> offsets = normal_factors(rng, groups * kPanelColumns);
  const std::vector<float> sums = normal_factors(rng, kMaxRows * groups);
  std::vector<float> f32(static_cast<std::size_t>(kMaxRows * padded));
  std::vector<std::uint16_t> b16(f32.size());
  for (std::size_t i = 0; i < f32.size(); ++i) {
    b16[i] = bf16_from_f32(static_cast<float>(rng.normal()));
    f32[i] = f32_from_bf16(b16[i]);
  }
  std::vector<const void*> f32_rows, b16_rows;
  std::vector<const float*> sum_rows;
  for (std::int64_t r = 0; r < kMaxRows; ++r) {
    f32_rows.push_back(&f32[static_cast<std::size_t>(r * padded)]);
    b16_rows.push_back(&b16[static_cast<std::size_t>(r * padded)]);
    sum_rows.push_back(&sums[static_cast<std::size_t>(r * groups)]);
  }
  PanelArgs args;
  args.fold = fold;
  args.padded_k = padded;
  if (scaled) {
    args.group_scales = reinterpret_cast<const std::byte*>(scales.data());
    args.group_scale_form = GroupScaleForm::kF32;
    args.group_offsets = offsets.data();
    args.row_sums = sum_rows.data();
  }
  for (const int rows : {1, 2, 3, 4, 5, 6, 7, 13, 32, 96}) {
    args.num_rows = rows;
    for (const bool narrow : {false, true}) {
      const auto& table = narrow ? k.grouped_gemm_bf16 : k.grouped_gemm_f32;
      ASSERT_EQ(table[WeightKind::kI6] == nullptr, table[WeightKind::kI8] == nullptr);
      if (table[WeightKind::kI6] == nullptr) continue;
      args.rows = narrow ? b16_rows.data() : f32_rows.data();
      Tensor want = poisoned_result(), got = poisoned_result();
      args.panel = bytes.data();
      args.result = want.as<float>();
      table[WeightKind::kI8](args);
      args.panel = six.data();
      args.result = got.as<float>();
      table[WeightKind::kI6](args);
      EXPECT_EQ(std::memcmp(want.data(), got.data(), sizeof(float) * kMaxRows * kPanelColumns), 0)
          << k.name << (narrow ? " bf16" : " f32") << " fold " << fold << " K " << depth << " rows "
          << rows;
    }
  }
}

TEST(SixBitGemm, HasTheBitsOfCodesInBytes) {
  std::vector<const CpuKernels*> all = tiers();
  if (kernels_amx_model() != nullptr) all.push_back(kernels_amx_model());
  for (const CpuKernels* k : all) {
    for (const int fold : {16, 32, 128}) {
      for (const std::int64_t depth : {12, 128, 400}) {
        compare_with_bytes(*k, fold, true, depth);
        compare_with_bytes(*k, fold, false, depth);
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu
