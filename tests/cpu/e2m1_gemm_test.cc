// The integer GEMM of e2m1 weights and rows against the bf16 one, whose bits it promises.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
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

constexpr int kSteps = kE2M1GroupSteps;

// Rows of e2m1 values with e4m3 scales in both forms.
struct Rows {
  Rows(const CpuKernels& k, test::Rng& rng, int count, std::int64_t depth)
      : values(static_cast<std::size_t>(count * depth)),
        b16(values.size()),
        scales(values.size() / kSteps),
        groups(scales.size()) {
    for (float& v : values) v = f32_from_e2m1(static_cast<std::uint8_t>(rng.integer(0, 15)));
    // Every finite scale, subnormal ones and zero among them.
    for (float& s : scales) s = f32_from_e4m3(static_cast<std::uint8_t>(rng.integer(0, 0x7E)));
    codes = values;
    for (int r = 0; r < count; ++r) {
      const std::int64_t at = r * depth;
      k.store_e2m1(&values[static_cast<std::size_t>(at)], depth,
                   &scales[static_cast<std::size_t>(at / kSteps)],
                   &groups[static_cast<std::size_t>(at / kSteps)]);
      b16_rows.push_back(&b16[static_cast<std::size_t>(at)]);
      group_rows.push_back(&groups[static_cast<std::size_t>(at / kSteps)]);
    }
    for (std::size_t i = 0; i < values.size(); ++i) b16[i] = bf16_from_f32(values[i]);
  }
  std::vector<float> values, codes;
  std::vector<std::uint16_t> b16;
  std::vector<float> scales;
  std::vector<E2M1Group> groups;
  std::vector<const void*> b16_rows, group_rows;
};

CodeTable4 e2m1_table() {
  std::array<float, 16> values{};
  for (std::uint8_t c = 0; c < 16; ++c) values[c] = f32_from_e2m1(c);
  return make_code_table(values);
}

// One panel of packed weights and what a call on it takes.
struct Panel {
  Panel(std::int64_t depth, const std::vector<std::byte>& matrix, std::vector<std::byte> e4m3)
      : packed(buffer(shape(depth))), scales(std::move(e4m3)), codes(e2m1_table()) {
    pack_matrix(shape(depth), matrix.data(), packed.data(), 1);
    args.panel = packed.data();
    args.group_scales = scales.data();
    args.group_scale_form = GroupScaleForm::kE4M3;
    args.fold = kSteps;
    args.codes = &codes;
    args.padded_k = depth;
  }
  PanelArgs with(const std::vector<const void*>& rows, Tensor& result) const {
    PanelArgs a = args;
    a.rows = rows.data();
    a.num_rows = static_cast<int>(rows.size());
    a.result = result.as<float>();
    return a;
  }

  WeightBuffer packed;
  std::vector<std::byte> scales;
  CodeTable4 codes;
  PanelArgs args;

 private:
  static PackedShape shape(std::int64_t depth) {
    return {WeightKind::kCode4, RowOrder::kPlain, kPanelColumns, depth, kSteps, 0};
  }
  static WeightBuffer buffer(const PackedShape& s) {
    return std::move(WeightBuffer::allocate(s.matrix_bytes())).value();
  }
};

class E2M1Gemm : public testing::Test {
 protected:
  void SetUp() override {
    for (const CpuKernels* k : tiers()) {
      if (k->grouped_gemm_e2m1 != nullptr) with_kernel_.push_back(k);
    }
    if (with_kernel_.empty()) GTEST_SKIP() << "no tier here has the integer kernel (AVX512_VNNI)";
  }
  std::vector<const CpuKernels*> with_kernel_;
};

TEST_F(E2M1Gemm, HasTheBitsOfTheBf16Kernel) {
  for (const CpuKernels* k : with_kernel_) {
    for (const std::int64_t depth : {16, 128, 272}) {
      test::Rng rng(static_cast<std::uint64_t>(depth));
      std::vector<std::byte> matrix(static_cast<std::size_t>(depth * kPanelColumns / 2));
      for (std::byte& b : matrix) b = static_cast<std::byte>(rng.integer(0, 255));
      std::vector<std::byte> scales(static_cast<std::size_t>(depth / kSteps * kPanelColumns));
      for (std::byte& s : scales) s = static_cast<std::byte>(rng.integer(0, 0x7E));
      const Panel panel(depth, matrix, std::move(scales));
      for (const int rows : {1, 2, 5, 6, 7, 11, 13, 22, 37, 96}) {
        Rows x(*k, rng, rows, depth);
        for (std::size_t i = 0; i < x.values.size(); ++i)
          ASSERT_EQ(x.values[i], x.codes[i] * x.scales[i / kSteps]);
        Tensor want = poisoned_result(), got = poisoned_result();
        k->grouped_gemm_bf16[WeightKind::kCode4](panel.with(x.b16_rows, want));
        k->grouped_gemm_e2m1(panel.with(x.group_rows, got));
        EXPECT_EQ(std::memcmp(want.data(), got.data(), sizeof(float) * kMaxRows * kPanelColumns), 0)
            << k->name << " K " << depth << " rows " << rows;
        EXPECT_NE(want.as<float>()[0], 0.0F);
      }
    }
  }
}

// A row whose scale is no number (the quantiser's answer to NaN and infinities) has no finite
// result; its neighbours do.
TEST_F(E2M1Gemm, ScalesThatAreNoNumbersReachEveryColumn) {
  for (const CpuKernels* k : with_kernel_) {
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      test::Rng rng(3);
      constexpr int kRows = 8;
      const Panel panel(kSteps, std::vector<std::byte>(kSteps * kPanelColumns / 2, std::byte{0x22}),
                        std::vector<std::byte>(kPanelColumns, std::byte{0x38}));
      Rows x(*k, rng, kRows, kSteps);
      std::vector<float> row(kSteps, 1.0F);
      k->store_e2m1(row.data(), kSteps, &bad, &x.groups[4]);
      Tensor result = poisoned_result();
      k->grouped_gemm_e2m1(panel.with(x.group_rows, result));
      for (int i = 0; i < kRows * kPanelColumns; ++i)
        EXPECT_EQ(std::isfinite(result.as<float>()[i]), i / kPanelColumns != 4)
            << k->name << " " << i;
    }
  }
}

}  // namespace
}  // namespace moesaic::cpu
