#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "moesaic/parallel.h"
#include "parallel/ep_config.h"

namespace moesaic {
namespace {

using test::ep_config;
using ExpertIds = std::vector<std::int64_t>;
using Map = std::vector<std::int32_t>;

ExpertIds ids_of(std::int64_t experts, int ep, int rank, ExpertPlacement placement) {
  return local_expert_ids(experts, ep_config(ep, rank, placement)).value();
}

// Worked example P1 of docs/spec/parallel.md.
TEST(ExpertPlacement, WorkedExampleTenExpertsFourRanks) {
  const auto linear = ExpertPlacement::kLinear;
  const auto robin = ExpertPlacement::kRoundRobin;
  EXPECT_EQ(ids_of(10, 4, 0, linear), (ExpertIds{0, 1, 2}));
  EXPECT_EQ(ids_of(10, 4, 1, linear), (ExpertIds{3, 4, 5}));
  EXPECT_EQ(ids_of(10, 4, 2, linear), (ExpertIds{6, 7}));
  EXPECT_EQ(ids_of(10, 4, 3, linear), (ExpertIds{8, 9}));
  EXPECT_EQ(ids_of(10, 4, 0, robin), (ExpertIds{0, 4, 8}));
  EXPECT_EQ(ids_of(10, 4, 1, robin), (ExpertIds{1, 5, 9}));
  EXPECT_EQ(ids_of(10, 4, 2, robin), (ExpertIds{2, 6}));
  EXPECT_EQ(ids_of(10, 4, 3, robin), (ExpertIds{3, 7}));
}

// docs/spec/checkpoints.md section 9, test 15: both maps of rank 1, written out.
TEST(ExpertPlacement, ExpertMapOfRankOne) {
  EXPECT_EQ(make_expert_map(10, ep_config(4, 1, ExpertPlacement::kLinear)).value(),
            (Map{-1, -1, -1, 0, 1, 2, -1, -1, -1, -1}));
  EXPECT_EQ(make_expert_map(10, ep_config(4, 1, ExpertPlacement::kRoundRobin)).value(),
            (Map{-1, 0, -1, -1, -1, 1, -1, -1, -1, 2}));
}

// P1's tables: experts in rank-major order (p2g) and the position of each expert in it (g2p).
TEST(ExpertPlacement, RankMajorOrderIsTheRoutingTable) {
  const auto tables = [](std::int64_t experts, int ep) {
    ExpertIds p2g;
    for (int r = 0; r < ep; ++r) {
      for (const std::int64_t id : ids_of(experts, ep, r, ExpertPlacement::kRoundRobin)) {
        p2g.push_back(id);
      }
    }
    ExpertIds g2p(p2g.size());
    for (std::size_t p = 0; p < p2g.size(); ++p) {
      g2p[static_cast<std::size_t>(p2g[p])] = static_cast<std::int64_t>(p);
    }
    return std::pair(g2p, p2g);
  };
  EXPECT_EQ(tables(10, 4), std::pair(ExpertIds({0, 3, 6, 8, 1, 4, 7, 9, 2, 5}),
                                     ExpertIds({0, 4, 8, 1, 5, 9, 2, 6, 3, 7})));
  EXPECT_EQ(tables(8, 2),
            std::pair(ExpertIds({0, 4, 1, 5, 2, 6, 3, 7}), ExpertIds({0, 2, 4, 6, 1, 3, 5, 7})));
}

// Property 2, over every small configuration.
TEST(ExpertPlacement, EveryExpertIsLocalOnExactlyOneRank) {
  for (const auto placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
    for (std::int64_t experts = 0; experts <= 33; ++experts) {
      for (int ep = 2; ep <= 9; ++ep) {
        SCOPED_TRACE("E=" + std::to_string(experts) + " ep=" + std::to_string(ep) + " " +
                     std::string(expert_placement_name(placement)));
        std::vector<int> owners(static_cast<std::size_t>(experts), 0);
        std::size_t fewest = 1000, most = 0;
        for (int r = 0; r < ep; ++r) {
          const auto config = ep_config(ep, r, placement);
          const ExpertIds ids = local_expert_ids(experts, config).value();
          const Map map = make_expert_map(experts, config).value();
          ASSERT_EQ(map.size(), static_cast<std::size_t>(experts));
          fewest = std::min(fewest, ids.size());
          most = std::max(most, ids.size());
          std::int32_t next_local = 0;  // local indices are 0..n-1, ascending in the global id
          for (std::size_t g = 0; g < map.size(); ++g) {
            if (map[g] < 0) continue;
            ++owners[g];
            ASSERT_EQ(map[g], next_local);
            ASSERT_EQ(ids[static_cast<std::size_t>(next_local)], static_cast<std::int64_t>(g));
            ++next_local;
          }
          ASSERT_EQ(static_cast<std::size_t>(next_local), ids.size());
        }
        EXPECT_LE(most - fewest, 1U);
        for (const int n : owners) ASSERT_EQ(n, 1);
      }
    }
  }
}

TEST(ExpertPlacement, WithoutExpertParallelismThereIsNoMap) {
  EXPECT_TRUE(make_expert_map(5, ParallelConfig{}).value().empty());
  EXPECT_EQ(local_expert_ids(3, ParallelConfig{}).value(), (ExpertIds{0, 1, 2}));
  ParallelConfig tp;
  tp.tp_size = 4;
  tp.tp_rank = 2;
  EXPECT_TRUE(make_expert_map(5, tp).value().empty());
  EXPECT_EQ(local_expert_ids(3, tp).value(), (ExpertIds{0, 1, 2}));
}

TEST(ExpertPlacement, RanksBeyondTheExpertsOwnNothing) {
  const auto config = ep_config(4, 3, ExpertPlacement::kLinear);
  EXPECT_TRUE(local_expert_ids(3, config).value().empty());
  EXPECT_EQ(make_expert_map(3, config).value(), (Map{-1, -1, -1}));
}

TEST(ExpertPlacement, RefusesWhatItCannotMap) {
  const auto negative = make_expert_map(-1, ParallelConfig{});
  ASSERT_FALSE(negative.ok());
  EXPECT_EQ(negative.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(negative.status().message().find("num_experts: got -1"), std::string::npos);
  const auto huge = local_expert_ids(std::int64_t{1} << 31, ParallelConfig{});
  ASSERT_FALSE(huge.ok());
  EXPECT_EQ(huge.status().code(), StatusCode::kLimitExceeded);
  const auto bad_rank = make_expert_map(8, ep_config(2, 2, ExpertPlacement::kLinear));
  ASSERT_FALSE(bad_rank.ok());
  EXPECT_EQ(bad_rank.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(bad_rank.status().message().find("ep_rank: got 2"), std::string::npos);
}

}  // namespace
}  // namespace moesaic
