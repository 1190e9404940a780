#include "quant/act_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

Tensor indices(const std::vector<int>& values) {
  Tensor t = Tensor::zeros(DType::kI32, {static_cast<std::int64_t>(values.size())}).value();
  std::copy(values.begin(), values.end(), t.as<std::int32_t>());
  return t;
}

TEST(ActOrder, SortsStably) {
  const Tensor g_idx = indices({1, 0, 2, 1, 0, 0, 2, 1, 2});
  Tensor perm = indices(std::vector<int>(9, -7));
  ASSERT_TRUE(quant::sort_columns_by_group(g_idx.view(), 3, perm.view()).ok());
  const std::vector<int> want = {1, 4, 5, 0, 3, 7, 2, 6, 8};
  for (std::size_t i = 0; i < 9; ++i) EXPECT_EQ(perm.as<std::int32_t>()[i], want[i]) << i;
  EXPECT_TRUE(quant::sorted_groups_are_regular(g_idx.view(), perm.view(), 3));
  EXPECT_FALSE(quant::sorted_groups_are_regular(g_idx.view(), perm.view(), 4));
  EXPECT_FALSE(quant::is_plain_group_index(g_idx.view(), 3));
  EXPECT_TRUE(quant::is_plain_group_index(indices({0, 0, 0, 1, 1}).view(), 3));
  EXPECT_TRUE(quant::is_plain_group_index(indices({0, 0, 0}).view(), -1));
  // A tensor-parallel slice: groups of the whole, unevenly many columns of each.
  const Tensor slice = indices({1, 2, 1, 1});
  Tensor order = indices({0, 0, 0, 0});
  ASSERT_TRUE(quant::sort_columns_by_group(slice.view(), 3, order.view()).ok());
  EXPECT_FALSE(quant::sorted_groups_are_regular(slice.view(), order.view(), 2));
}

// Gathering weights and activations alike leaves every dot product what it was.
TEST(ActOrder, GatheredDotProductsAreUnchanged) {
  test::Rng rng(5);
  constexpr std::int64_t kN = 3, kK = 257;
  std::vector<int> groups(kK);
  for (auto& g : groups) g = static_cast<int>(rng.integer(0, 8));
  const Tensor g_idx = indices(groups);
  Tensor perm = indices(std::vector<int>(kK, -1));
  ASSERT_TRUE(quant::sort_columns_by_group(g_idx.view(), 9, perm.view()).ok());
  Tensor w = Tensor::zeros(DType::kI8, {kN, kK}).value();
  for (std::int64_t i = 0; i < kN * kK; ++i) {
    w.as<std::int8_t>()[i] = static_cast<std::int8_t>(rng.integer(-128, 127));
  }
  std::vector<int> x(kK);
  for (auto& v : x) v = static_cast<int>(rng.integer(-50, 50));
  std::vector<int> sorted_groups = groups;
  std::sort(sorted_groups.begin(), sorted_groups.end());
  for (std::int64_t n = 0; n < kN; ++n) {
    std::int64_t before = 0, after = 0;
    for (std::int64_t k = 0; k < kK; ++k) {
      const auto from = static_cast<std::size_t>(perm.as<std::int32_t>()[k]);
      before += std::int64_t{w.as<std::int8_t>()[n * kK + k]} * x[static_cast<std::size_t>(k)] *
                (groups[static_cast<std::size_t>(k)] + 1);
      // As a kernel sees it: column k of the sorted weights has the scale of group `sorted_group`.
      const int sorted_group = sorted_groups[static_cast<std::size_t>(k)];
      after += std::int64_t{w.as<std::int8_t>()[n * kK + static_cast<std::int64_t>(from)]} *
               x[from] * (sorted_group + 1);
    }
    EXPECT_EQ(before, after);
  }
  // Groups are in order, and within a group columns are.
  for (std::int64_t i = 1; i < kK; ++i) {
    const int a = perm.as<std::int32_t>()[i - 1];
    const int b = perm.as<std::int32_t>()[i];
    const int ga = groups[static_cast<std::size_t>(a)];
    const int gb = groups[static_cast<std::size_t>(b)];
    ASSERT_TRUE(ga < gb || (ga == gb && a < b)) << i;
  }
}

TEST(ActOrder, Misuse) {
  Tensor perm = indices({0, 0, 0});
  expect_refusal(quant::sort_columns_by_group(indices({0, 3, 1}).view(), 3, perm.view()),
                 StatusCode::kInvalidArgument, {"g_idx[1]", "got 3", "0 .. 2"});
  expect_refusal(quant::sort_columns_by_group(indices({0, -1, 1}).view(), 3, perm.view()),
                 StatusCode::kInvalidArgument, {"g_idx[1]", "got -1"});
  expect_refusal(quant::sort_columns_by_group(indices({0, 1}).view(), 3, perm.view()),
                 StatusCode::kInvalidShape, {"perm", "[3]", "[2]"});
  expect_refusal(quant::sort_columns_by_group(indices({0, 1}).view(), 0, perm.view()),
                 StatusCode::kInvalidArgument, {"groups", "0"});
}

}  // namespace
}  // namespace moesaic
