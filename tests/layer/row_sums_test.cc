// The sum of a layer's parts against one element after the other, bit for bit.
#include "layer/cpu/row_sums.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "cpu/team.h"
#include "cpu/tiers.h"
#include "numerics/element.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using layer::RowPart;
using layer::RowRange;

constexpr std::int64_t kSumRows = 7;

std::vector<float> normal_numbers(test::Rng& rng, std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& v : values) v = static_cast<float>(rng.normal());
  return values;
}

// Rows of part p from `first` on, the factor of each, whether a row of the sum has it.
void expect_sums(DType dtype, std::int64_t hidden, RowRange rows, RowRange only, int threads) {
  test::Rng rng(static_cast<std::uint64_t>(hidden) + 3);
  std::array<std::vector<float>, 3> values;
  for (auto& v : values) v = normal_numbers(rng, kSumRows * hidden);
  const std::vector<float> factors = normal_numbers(rng, kSumRows);
  const std::array<RowPart, 3> parts = {
      RowPart{values[0].data(), rows.first, 2.5F},
      RowPart{values[1].data(), 0, 1.0F, factors.data()},
      RowPart{values[2].data(), 0, 1.0F, nullptr, only},
  };
  Tensor want = Tensor::uninitialized(dtype, {kSumRows, hidden}).value();
  test::poison(want.view());
  Tensor got = Tensor::uninitialized(dtype, {kSumRows, hidden}).value();
  test::poison(got.view());
  for (std::int64_t t = rows.first; t < rows.first + rows.count; ++t) {
    for (std::int64_t h = 0; h < hidden; ++h) {
      const auto at = static_cast<std::size_t>(t * hidden + h);
      float sum = 2.5F * values[0][static_cast<std::size_t>((t - rows.first) * hidden + h)];
      sum += factors[static_cast<std::size_t>(t)] * values[1][at];
      const bool has = only.count < 0 || (t >= only.first && t < only.first + only.count);
      if (has) sum += values[2][at];
      store_from_f32(want.data(), dtype, t * hidden + h, sum);
    }
  }
  const cpu::ScopedTeams teams;
  layer::add_row_parts(*cpu::current_kernels().value(), parts, rows, got.view(), threads);
  std::string why;
  EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why))
      << dtype_name(dtype) << ' ' << hidden << ' ' << rows.first << ' ' << why;
}

TEST(RowSums, AreThoseOfOneElementAfterTheOther) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t hidden : {1, 60, 512, 513, 1100}) {
      for (const int threads : {1, 3}) {
        expect_sums(dtype, hidden, {0, kSumRows}, {0, -1}, threads);
        expect_sums(dtype, hidden, {2, 4}, {3, 2}, threads);
        expect_sums(dtype, hidden, {2, 0}, {0, 0}, threads);
      }
    }
  }
}

TEST(RowSums, ASumMayBeInThePlaceOfItsFirstPart) {
  test::Rng rng(1);
  std::vector<float> rows = normal_numbers(rng, kSumRows * 600);
  const std::vector<float> more = normal_numbers(rng, kSumRows * 600);
  std::vector<float> want = rows;
  for (std::size_t i = 0; i < want.size(); ++i) want[i] = 0.5F * want[i] + more[i];
  layer::add_row_parts(
      *cpu::current_kernels().value(),
      {RowPart{rows.data(), 0, 0.5F}, RowPart{}, RowPart{more.data()}}, {0, kSumRows},
      TensorView(reinterpret_cast<std::byte*>(rows.data()), DType::kF32, {kSumRows, 600}), 2);
  EXPECT_EQ(rows, want);
}

}  // namespace
}  // namespace moesaic
