// The cost model of a transport, byte by byte: what each rank sends is computed here from the
// routing alone and compared with what the communicator counted.
#include <gtest/gtest.h>

#include <set>

#include "prepare_finalize/transport_case.h"
#include "quant/block_scales.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::Transport;

struct Model {
  std::int64_t row = 0, back = 0;  // bytes of a row there and of a result back
  std::int64_t slots = 0;          // ids and weights of a row
};

// Bytes that rank `me` sends in one call.
std::int64_t expected(const test::StandardCase& c, const std::vector<std::int64_t>& counts, int me,
                      Transport transport, const Model& m) {
  const int ranks = static_cast<int>(counts.size());
  ParallelConfig parallel;
  parallel.ep_size = ranks;
  const auto owners = expert_owners(c.problem.num_experts, parallel).value();
  std::int64_t bytes = 2 * 8 * (ranks - 1);  // two headers for each other rank
  std::int64_t first = 0;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t rows = counts[static_cast<std::size_t>(r)];
    for (std::int64_t t = first; t < first + rows; ++t) {
      std::multiset<int> slots;
      for (std::int64_t j = 0; j < c.problem.top_k; ++j) {
        const std::int32_t id = c.routing.ids.as<std::int32_t>()[t * c.problem.top_k + j];
        if (id >= 0) slots.insert(owners[static_cast<std::size_t>(id)]);
      }
      for (int other = 0; other < ranks; ++other) {
        const auto n = static_cast<std::int64_t>(slots.count(other));
        const std::int64_t copies = transport == Transport::kGather    ? 1
                                    : transport == Transport::kBatched ? n
                                                                       : n > 0;
        if (r == me && other != me) {
          bytes += copies * (m.row + (transport == Transport::kBatched ? 0 : m.slots));
        }
        if (r != me && other == me) bytes += copies * m.back;
      }
    }
    first += rows;
  }
  if (transport == Transport::kBatched) {  // how many rows for each expert elsewhere
    for (const std::int32_t owner : owners) bytes += owner == me ? 0 : 4;
  }
  return bytes;
}

TEST(TransportBytes, EqualTheFormulaOnTwoFourAndEightRanks) {
  for (const std::size_t ranks : {2U, 4U, 8U}) {
    for (const char* quant : {"bf16", "fp8-block"}) {
      MoeProblem problem = test::small_problem(quant);
      problem.num_experts = problem.num_local_experts = 16;
      problem.top_k = 5;
      std::vector<std::int64_t> counts;
      for (std::size_t r = 0; r < ranks; ++r) {
        counts.push_back(r == 1 ? 0 : 3 + static_cast<std::int64_t>(r % 3));
      }
      std::int64_t tokens = 0;
      for (const std::int64_t n : counts) tokens += n;
      const auto c = test::make_case(40 + ranks, problem, tokens, DType::kBF16, 0.1);
      for (const Transport transport : test::kTransports) {
        for (const DType back : {DType::kF32, DType::kBF16}) {
          SCOPED_TRACE(std::string(quant) + " " + test::transport_name(transport) + " on " +
                       std::to_string(ranks));
          const std::int64_t h = problem.hidden_size;
          const Model model{
              std::string(quant) == "bf16" ? 2 * h : h + 4 * (h / quant::kFp8BlockSize),
              h * dtype_bits(back) / 8, 8 * problem.top_k};
          const auto run = test::run_transport(
              c, counts, {.transport = transport, .combine_dtype = back, .repeats = 1});
          for (std::size_t r = 0; r < ranks; ++r) {
            ASSERT_TRUE(run.ranks[r].calls[0].ok()) << run.ranks[r].calls[0].message();
            EXPECT_EQ(run.ranks[r].bytes_sent,
                      expected(c, counts, static_cast<int>(r), transport, model))
                << "rank " << r;
          }
        }
      }
    }
  }
}

// Uniform routing: a row goes to R (1 - C(E - E/R, k) / C(E, k)) distinct ranks on average. The
// figures that the design counts with, for E = 256 and k = 8.
TEST(TransportBytes, DistinctRanksOfARowAreAsMany) {
  const auto ranks_reached = [](int experts, int top_k, int ranks) {
    double none = 1;  // that no slot of a row is on a given rank
    for (int j = 0; j < top_k; ++j) {
      none *= static_cast<double>(experts - experts / ranks - j) / (experts - j);
    }
    return ranks * (1 - none);
  };
  EXPECT_NEAR(ranks_reached(256, 8, 2), 1.99, 0.01);
  EXPECT_NEAR(ranks_reached(256, 8, 4), 3.61, 0.01);
  EXPECT_NEAR(ranks_reached(256, 8, 8), 5.29, 0.02);
  // And what a router that draws uniformly does, over 4000 rows.
  test::Rng rng(17);
  for (const int ranks : {2, 4, 8}) {
    std::int64_t sum = 0;
    constexpr int kSampled = 4000;
    for (int t = 0; t < kSampled; ++t) {
      std::set<std::int64_t> ids, on;
      while (ids.size() < 8) ids.insert(rng.integer(0, 255));
      for (const std::int64_t id : ids) on.insert(id / (256 / ranks));
      sum += static_cast<std::int64_t>(on.size());
    }
    EXPECT_NEAR(static_cast<double>(sum) / kSampled, ranks_reached(256, 8, ranks), 0.06);
  }
}

}  // namespace
}  // namespace moesaic
