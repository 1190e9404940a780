#include <gtest/gtest.h>

#include <set>
#include <string>

#include "moesaic/parallel.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

// The table of docs/spec/parallel.md section 1: sizes (tp, pcp, dp), ranks, flattened rank / size.
TEST(ParallelConfig, FlattensAsTheTableSays) {
  struct Row {
    int tp, pcp, dp, tp_rank, pcp_rank, dp_rank, rank, size;
  };
  for (const Row& row : {Row{2, 1, 1, 1, 0, 0, 1, 2}, Row{2, 1, 2, 1, 0, 1, 3, 4},
                         Row{1, 1, 2, 0, 0, 1, 1, 2}, Row{2, 2, 2, 1, 1, 0, 3, 8}}) {
    ParallelSizes sizes{row.tp, row.tp_rank, row.pcp, row.pcp_rank, row.dp, row.dp_rank, false};
    const ParallelConfig tensor = ParallelConfig::from_sizes(sizes).value();
    EXPECT_EQ(tensor.tp_rank, row.rank);
    EXPECT_EQ(tensor.tp_size, row.size);
    EXPECT_EQ(tensor.ep_size, 1);
    EXPECT_EQ(tensor.ep_rank, 0);
    EXPECT_EQ(tensor.dp_size, row.dp);
    EXPECT_EQ(tensor.dp_rank, row.dp_rank);
    EXPECT_TRUE(tensor.validate().ok());
    sizes.enable_expert_parallel = true;
    const ParallelConfig expert = ParallelConfig::from_sizes(sizes).value();
    EXPECT_EQ(expert.ep_rank, row.rank);
    EXPECT_EQ(expert.ep_size, row.size);
    EXPECT_EQ(expert.tp_size, 1);
    EXPECT_EQ(expert.tp_rank, 0);
    EXPECT_TRUE(expert.validate().ok());
  }
}

// Property 1.
TEST(ParallelConfig, FlatRankIsABijection) {
  for (const bool ep : {false, true}) {
    std::set<int> seen;
    for (int dp = 0; dp < 3; ++dp) {
      for (int pcp = 0; pcp < 2; ++pcp) {
        for (int tp = 0; tp < 5; ++tp) {
          const auto c = ParallelConfig::from_sizes({5, tp, 2, pcp, 3, dp, ep}).value();
          seen.insert(ep ? c.ep_rank : c.tp_rank);
        }
      }
    }
    EXPECT_EQ(seen.size(), 30U);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), 29);
  }
}

TEST(ParallelConfig, OneProcessNeverUsesExpertParallelism) {
  ParallelSizes sizes;
  sizes.enable_expert_parallel = true;
  const ParallelConfig c = ParallelConfig::from_sizes(sizes).value();
  EXPECT_EQ(c.ep_size, 1);
  EXPECT_EQ(c.tp_size, 1);
}

TEST(ParallelConfig, RefusesSizesAndRanksByName) {
  const auto refuse = [](ParallelSizes sizes, const std::string& words) {
    const auto result = ParallelConfig::from_sizes(sizes);
    ASSERT_FALSE(result.ok());
    test::expect_refusal(result.status(), StatusCode::kInvalidArgument, {words.c_str()});
  };
  refuse({.tp_size = 0}, "tp_size: got 0");
  refuse({.pcp_size = -3}, "pcp_size: got -3");
  refuse({.dp_size = 0}, "dp_size: got 0");
  refuse({.tp_size = 2, .tp_rank = 2}, "tp_rank: got 2");
  refuse({.tp_rank = -1}, "tp_rank: got -1");
  refuse({.pcp_rank = 1}, "pcp_rank: got 1");
  refuse({.dp_size = 4, .dp_rank = 4}, "dp_rank: got 4");
  const int huge = 1 << 30;
  const auto overflow =
      ParallelConfig::from_sizes({.tp_size = huge, .pcp_size = huge, .dp_size = huge});
  ASSERT_FALSE(overflow.ok());
  test::expect_refusal(overflow.status(), StatusCode::kLimitExceeded, {"flat_size"});
}

TEST(ParallelConfig, ValidateNamesTheField) {
  ParallelConfig c;
  EXPECT_TRUE(c.validate().ok());
  c.ep_size = 0;
  test::expect_refusal(c.validate(), StatusCode::kInvalidArgument, {"ep_size: got 0"});
  c = {};
  c.ep_rank = 1;
  test::expect_refusal(c.validate(), StatusCode::kInvalidArgument, {"ep_rank: got 1"});
  c = {};
  c.tp_size = 2;
  c.ep_size = 2;
  test::expect_refusal(c.validate(), StatusCode::kInvalidArgument, {"tp_size: got 2"});
  c = {};
  c.ep_size = 4;
  c.dp_size = 3;
  test::expect_refusal(c.validate(), StatusCode::kInvalidArgument, {"dp_size: got 3"});
  c = {};
  c.placement = static_cast<ExpertPlacement>(7);
  test::expect_refusal(c.validate(), StatusCode::kInvalidArgument, {"placement: got 7"});
}

TEST(ParallelConfig, PlacementNames) {
  EXPECT_EQ(expert_placement_name(ExpertPlacement::kLinear), "linear");
  EXPECT_EQ(expert_placement_name(ExpertPlacement::kRoundRobin), "round_robin");
}

}  // namespace
}  // namespace moesaic
