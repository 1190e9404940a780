#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>
#include <vector>

#include "moesaic/interop/parallel.h"
#include "moesaic/log.h"
#include "parallel/ep_config.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::ep_config;
using test::expect_refusal;
using Counts = std::vector<std::int64_t>;
using Ids = std::vector<std::int32_t>;

// Worked example P2.
TEST(HiddenRounding, WorkedExamples) {
  const auto high = [](std::int64_t h, std::int64_t bytes) {
    return round_hidden_size(h, bytes, HiddenRounding::kHighThroughput).value();
  };
  EXPECT_EQ(high(2880, 2), 3072);
  EXPECT_EQ(high(2688, 2), 2816);
  EXPECT_EQ(high(100, 2), 256);
  EXPECT_EQ(high(4096, 2), 4096);
  EXPECT_EQ(high(2880, 1), 3072);
  EXPECT_EQ(high(4100, 1), 4608);
  const auto low = [](std::int64_t h) {
    return round_hidden_size(h, 2, HiddenRounding::kLowLatency);
  };
  EXPECT_EQ(low(2880).value(), 3072);
  EXPECT_EQ(low(5000).value(), 5120);
  EXPECT_EQ(low(100).value(), 2048);
  EXPECT_EQ(low(8192).value(), 8192);
  expect_refusal(low(8193).status(), StatusCode::kLimitExceeded, {"hidden_size: got 8193", "8192"});
  EXPECT_EQ(round_hidden_size(77, 2, HiddenRounding::kNone).value(), 77);
}

TEST(HiddenRounding, Mxfp4SizesFollowTheKernelFamily) {
  const auto sizes = [](Mxfp4Padding padding) {
    const LayerSizes s = round_mxfp4_sizes({2880, 2880}, padding).value();
    return std::pair(s.hidden_size, s.intermediate_size);
  };
  using Pair = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(sizes(Mxfp4Padding::kMarlin), Pair(3072, 2944));
  EXPECT_EQ(sizes(Mxfp4Padding::kFlashInferTrtllm), Pair(3072, 3072));
  EXPECT_EQ(sizes(Mxfp4Padding::kFlashInferCutlass), Pair(2944, 2944));
  EXPECT_EQ(sizes(Mxfp4Padding::kRocm), Pair(3072, 3072));
  EXPECT_EQ(sizes(Mxfp4Padding::kOther), Pair(2880, 2880));
  EXPECT_EQ(round_mxfp4_sizes({100, 100}, Mxfp4Padding::kOther)->intermediate_size, 128);
}

TEST(HiddenRounding, RefusesByName) {
  const auto rule = HiddenRounding::kHighThroughput;
  expect_refusal(round_hidden_size(0, 2, rule).status(), StatusCode::kInvalidArgument,
                 {"hidden_size: got 0"});
  expect_refusal(round_hidden_size(8, 3, rule).status(), StatusCode::kInvalidArgument,
                 {"element_bytes: got 3"});
  expect_refusal(round_hidden_size((std::int64_t{1} << 61) + 5, 4, rule).status(),
                 StatusCode::kLimitExceeded, {"hidden_size"});
  expect_refusal(round_hidden_size(8, 2, static_cast<HiddenRounding>(3)).status(),
                 StatusCode::kInvalidArgument, {"rounding: got 3"});
  expect_refusal(round_mxfp4_sizes({16, 16}, static_cast<Mxfp4Padding>(5)).status(),
                 StatusCode::kInvalidArgument, {"padding: got 5"});
  expect_refusal(round_mxfp4_sizes({16, -1}, Mxfp4Padding::kMarlin).status(),
                 StatusCode::kInvalidArgument, {"intermediate_size: got -1"});
}

// Worked example P9.
TEST(TokenChunks, WorkedExample) {
  const Counts tokens = {5, 8};
  EXPECT_EQ(sequence_parallel_rows(tokens, 2).value(), (Counts{3, 3, 4, 4}));
  using Chunks = std::vector<TokenChunk>;
  EXPECT_EQ(plan_chunks(9, 9, 4, true).value(), (Chunks{{0, 4}, {4, 4}, {8, 1}}));
  EXPECT_EQ(plan_chunks(2, 9, 4, true).value(), (Chunks{{0, 2}, {1, 1}, {1, 1}}));
  EXPECT_EQ(plan_chunks(2, 9, 4).value(), (Chunks{{0, 2}, {2, 0}, {2, 0}}));
  EXPECT_TRUE(plan_chunks(0, 0, 4).value().empty());
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(plan_chunks(5, 10, most).value(), (Chunks{{0, 5}}));
  EXPECT_TRUE(plan_chunks(0, 0, most).value().empty());
  const std::int64_t rows = std::int64_t{1} << 62;
  EXPECT_EQ(plan_chunks(rows, rows, rows - 1).value(), (Chunks{{0, rows - 1}, {rows - 1, 1}}));
}

// Property 7: all ranks take as many steps, and each row is in exactly one of them.
TEST(TokenChunks, CoverEveryRowOnceInEquallyManySteps) {
  for (std::int64_t most = 0; most < 12; ++most) {
    for (std::int64_t size = 1; size < 6; ++size) {
      for (std::int64_t tokens = 0; tokens <= most; ++tokens) {
        const auto chunks = plan_chunks(tokens, most, size).value();
        EXPECT_EQ(static_cast<std::int64_t>(chunks.size()), (most + size - 1) / size);
        std::int64_t next = 0;
        for (const TokenChunk& c : chunks) {
          EXPECT_LE(c.count, size);
          EXPECT_EQ(c.first, next);
          next += c.count;
        }
        EXPECT_EQ(next, tokens);
      }
    }
  }
}

TEST(TokenChunks, RefusesByName) {
  expect_refusal(plan_chunks(1, 1, 0).status(), StatusCode::kInvalidArgument,
                 {"chunk_size: got 0"});
  expect_refusal(plan_chunks(1, (std::int64_t{1} << 62) + 1, 1).status(),
                 StatusCode::kInvalidArgument, {"max_tokens: got 46", "2^62"});
  expect_refusal(plan_chunks(2, 1, 1).status(), StatusCode::kInvalidArgument, {"tokens: got 2"});
  expect_refusal(plan_chunks(0, std::int64_t{1} << 61, 1).status(), StatusCode::kOutOfMemory,
                 {"max_tokens"});
  expect_refusal(plan_chunks(0, 3, 1, true).status(), StatusCode::kInvalidArgument,
                 {"tokens: got 0"});
  const Counts negative = {3, -1};
  expect_refusal(sequence_parallel_rows(negative, 2).status(), StatusCode::kInvalidArgument,
                 {"tokens_per_dp_rank: got -1"});
  expect_refusal(sequence_parallel_rows({}, 0).status(), StatusCode::kInvalidArgument,
                 {"sp_size: got 0"});
}

// P1: routing tables. Property 3: rank r's slice of the inverse is its list of experts.
TEST(RoutingTables, WorkedExamples) {
  const auto robin = ExpertPlacement::kRoundRobin;
  const RoutingTables ten = make_routing_tables(10, ep_config(4, 1, robin)).value();
  EXPECT_EQ(ten.global_to_physical, (Ids{0, 3, 6, 8, 1, 4, 7, 9, 2, 5}));
  EXPECT_EQ(ten.physical_to_global, (Ids{0, 4, 8, 1, 5, 9, 2, 6, 3, 7}));
  EXPECT_EQ(ten.local_to_global, (Ids{1, 5, 9}));
  const RoutingTables eight = make_routing_tables(8, ep_config(2, 0, robin)).value();
  EXPECT_EQ(eight.global_to_physical, (Ids{0, 4, 1, 5, 2, 6, 3, 7}));
  EXPECT_EQ(eight.physical_to_global, (Ids{0, 2, 4, 6, 1, 3, 5, 7}));
}

TEST(RoutingTables, ArePermutationsThatKeepRanksTogether) {
  for (int ep = 1; ep <= 7; ++ep) {
    for (std::int64_t experts = 1; experts <= 20; ++experts) {
      std::int64_t first = 0;
      for (int r = 0; r < ep; ++r) {
        const auto config = ep_config(ep, r, ExpertPlacement::kRoundRobin);
        const RoutingTables t = make_routing_tables(experts, config).value();
        // The closed formula of the specification.
        const std::int64_t base = experts / ep;
        const std::int64_t rem = experts % ep;
        for (std::int64_t g = 0; g < experts; ++g) {
          const std::int32_t p = t.global_to_physical[static_cast<std::size_t>(g)];
          EXPECT_EQ(p, (g % ep) * base + std::min(g % ep, rem) + g / ep);
          EXPECT_EQ(t.physical_to_global[static_cast<std::size_t>(p)], g);
        }
        for (std::size_t i = 0; i < t.local_to_global.size(); ++i) {
          EXPECT_EQ(t.physical_to_global[static_cast<std::size_t>(first) + i],
                    t.local_to_global[i]);
        }
        first += static_cast<std::int64_t>(t.local_to_global.size());
      }
      EXPECT_EQ(first, experts);
    }
  }
}

TEST(ExpertOwnership, OwnersInvertTheMaps) {
  for (const auto placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
    const Ids owners = expert_owners(11, ep_config(4, 2, placement)).value();
    for (int r = 0; r < 4; ++r) {
      const Counts ids = local_expert_ids(11, ep_config(4, r, placement)).value();
      for (const std::int64_t id : ids) {
        EXPECT_EQ(owners[static_cast<std::size_t>(id)], r);
      }
    }
  }
}

TEST(ExpertOwnership, MaskedMapEndsWithSharedExpertsAndASentinel) {
  const MaskedExpertMap m = make_masked_expert_map(5, ep_config(2, 1), 2).value();
  EXPECT_EQ(m.map, (Ids{-1, -1, -1, 0, 1, 2, 3}));
  EXPECT_EQ(m.mask, (Ids{0, 0, 0, 1, 1, 1, 1, 0}));
  expect_refusal(make_masked_expert_map(5, ep_config(2, 1), -1).status(),
                 StatusCode::kInvalidArgument, {"fused_shared: got -1"});
}

TEST(ExpertOwnership, UpdateFollowsTheNewWorld) {
  const ExpertOwnership grown = update_expert_map(10, ep_config(2, 1), 4, 2).value();
  EXPECT_EQ(grown.local_ids, (Counts{6, 7}));
  EXPECT_EQ(grown.expert_map, (Ids{-1, -1, -1, -1, -1, -1, 0, 1, -1, -1}));
  const ExpertOwnership alone = update_expert_map(3, ep_config(2, 1), 1, 0).value();
  EXPECT_TRUE(alone.expert_map.empty());
  EXPECT_EQ(alone.local_ids, (Counts{0, 1, 2}));
  ParallelConfig dp = ep_config(2, 1);
  dp.dp_size = 2;
  dp.dp_rank = 1;
  EXPECT_EQ(update_expert_map(8, dp, 4, 3)->config.dp_size, 4);
  // Two ranks of each dp rank, neighbours: four of each in a world twice as large.
  ParallelConfig pairs = ep_config(4, 1);
  pairs.dp_size = 2;
  const ExpertOwnership eighth = update_expert_map(16, pairs, 8, 6).value();
  EXPECT_EQ(eighth.config.dp_size, 2);
  EXPECT_EQ(eighth.config.dp_rank, 1);
  expect_refusal(update_expert_map(8, dp, 2, 2).status(), StatusCode::kInvalidArgument,
                 {"ep_rank: got 2"});
  // Ranks that have parts of a sequence keep having them.
  ParallelConfig sequence = ep_config(4, 1);
  sequence.sp_size = 4;
  EXPECT_EQ(update_expert_map(16, sequence, 8, 6)->config.sp_size, 8);
  EXPECT_TRUE(update_expert_map(16, sequence, 8, 6)->config.is_sequence_parallel());
}

TEST(Placement, RoundRobinFallsBackWithAReason) {
  std::string said;
  set_log_sink([&](std::string_view text) { said = text; });
  const auto resolve = [](const PlacementFacts& facts, int ep = 4) {
    return resolve_placement(ExpertPlacement::kRoundRobin, 8, ep, facts);
  };
  PlacementFacts good;
  good.num_expert_group = 4;
  EXPECT_EQ(resolve(good).value(), ExpertPlacement::kRoundRobin);
  EXPECT_EQ(said, "");
  PlacementFacts facts = good;
  facts.all_to_all = true;
  EXPECT_EQ(resolve(facts).value(), ExpertPlacement::kLinear);
  EXPECT_NE(said.find("routing tables"), std::string::npos);
  facts.takes_routing_tables = true;
  EXPECT_EQ(resolve(facts).value(), ExpertPlacement::kRoundRobin);
  facts = good;
  facts.num_expert_group = 1;
  EXPECT_EQ(resolve(facts).value(), ExpertPlacement::kLinear);
  facts = good;
  facts.enable_eplb = true;
  EXPECT_EQ(resolve(facts).value(), ExpertPlacement::kLinear);
  EXPECT_EQ(resolve(good, 1).value(), ExpertPlacement::kLinear);
  set_log_sink({});
  expect_refusal(resolve(facts, 3).status(), StatusCode::kInvalidArgument, {"num_experts: got 8"});
  facts = good;
  facts.num_redundant_experts = 2;
  expect_refusal(resolve(facts).status(), StatusCode::kInvalidArgument,
                 {"num_redundant_experts: got 2"});
}

// Which ranks gather rows and which add up partial sums: together they are all ranks.
TEST(Groups, TokenAndReplicaGroupsCrossEachOther) {
  for (const bool ep : {false, true}) {
    for (const bool sp : {false, true}) {
      for (int dp = 0; dp < 2; ++dp) {
        for (int pcp = 0; pcp < 2; ++pcp) {
          for (int tp = 0; tp < 3; ++tp) {
            const ParallelConfig c =
                ParallelConfig::from_sizes({3, tp, 2, pcp, 2, dp, ep, sp}).value();
            ASSERT_TRUE(c.validate().ok()) << c.validate().message();
            EXPECT_EQ(c.engine_tp_size(), 3);
            EXPECT_EQ(c.is_sequence_parallel(), sp);
            EXPECT_EQ(c.use_all_to_all(), ep);
            const std::vector<int> tokens = c.token_group();
            const std::vector<int> replicas = c.replica_group();
            EXPECT_EQ(tokens.size() * replicas.size(), 12U);
            const std::set<int> t(tokens.begin(), tokens.end());
            const std::set<int> r(replicas.begin(), replicas.end());
            EXPECT_TRUE(t.contains(c.flat_rank()));
            EXPECT_TRUE(r.contains(c.flat_rank()));
            for (const int rank : r) EXPECT_TRUE(rank == c.flat_rank() || !t.contains(rank));
          }
        }
      }
    }
  }
}

TEST(Groups, SequenceParallelSizeIsChecked) {
  ParallelConfig c = ep_config(4, 0);
  c.sp_size = 3;
  expect_refusal(c.validate(), StatusCode::kInvalidArgument, {"sp_size: got 3", "4"});
  c.sp_size = 1;
  c.pcp_size = 3;
  expect_refusal(c.validate(), StatusCode::kInvalidArgument, {"pcp_size: got 3"});
}

}  // namespace
}  // namespace moesaic
