// Every rank's rows are those of one rank, and what one rank refuses ends the call of all, in worlds
// drawn from seeds (support/random_cases.h).
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "layer/random_rank_gpu.h"
#include "layer/random_rank_run.h"
#include "layer/random_world.h"
#include "moesaic/device.h"
#include "support/random_cases.h"

namespace moesaic {
namespace {

// Ranks that share a GPU wait for each other there; read when CUDA starts.
const bool kEnvironment = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0 &&
                          setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

// A rank that waits so long was not told.
constexpr int kPatienceMs = 30'000;

// Whether ranks could have the layer.
bool run_case(const test::RandomRanks& c) {
  auto ranks =
      make_in_process_communicators(c.eras.front().world.ranks(), {.timeout_ms = kPatienceMs})
          .value();
  std::vector<std::string> wrong(ranks.size());
  std::vector<char> refused(ranks.size(), 0);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      bool none = false;
      wrong[r] = test::run_rank(c, std::shared_ptr<Communicator>(std::move(ranks[r])), none);
      refused[r] = none ? 1 : 0;
    });
  }
  for (std::thread& t : threads) t.join();
  for (std::size_t r = 0; r < wrong.size(); ++r) {
    EXPECT_EQ(wrong[r], "") << "rank " << r << ", " << c.describe();
    EXPECT_EQ(refused[r], refused[0]) << "rank " << r << ", " << c.describe();
  }
  return refused[0] == 0;
}

// At least one in `few` worlds is to be one that ranks can have.
void check_seeds(const std::vector<Device>& devices, std::uint64_t cases, std::uint64_t few) {
  const test::Seeds seeds = test::seeds_of_run(cases);
  std::uint64_t ran = 0;
  for (std::uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const std::optional<test::RandomRanks> c = test::draw_ranks(seed, devices);
    if (c && run_case(*c)) ++ran;
  }
  EXPECT_GE(few * ran, seeds.cases > 20 ? seeds.cases : 0)
      << "more are to be layers that ranks can have";
}

TEST(RandomRanks, EveryRankHasTheRowsOfOneRank) { check_seeds({Device::cpu()}, 200, 2); }

TEST(RandomRanks, EveryRankHasTheRowsOfOneGpu) {
  if (!query_cuda().available) GTEST_SKIP() << "needs a Hopper GPU: " << query_cuda().reason;
  std::vector<Device> devices;
  for (const CudaDeviceInfo& d : query_cuda().devices) {
    if (d.available) devices.push_back(Device::cuda(d.index));
  }
  check_seeds(devices, 60, 3);
  const std::int64_t replays = test::replayed_graphs();
  testing::Test::RecordProperty("replays", std::to_string(replays));
  if (test::seeds_of_run(60).cases > 20) {
    EXPECT_GT(replays, 0) << "some calls are to be captured";
  }
}

}  // namespace
}  // namespace moesaic
