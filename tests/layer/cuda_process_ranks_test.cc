// The layer over ranks that are processes, each on a GPU of its own as far as there are some, through
// peer windows: the bits of messages, in graphs too, and what is left when one of them is killed. Each
// process is this program again.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "layer/peer_calls.h"
#include "parallel/peer_window.h"
#include "support/process_ranks.h"

namespace moesaic {
namespace {

using test::engines_of;
using test::LayerTensors;
using test::RankCalls;
using test::RankProcesses;
using test::StartedRank;

// Read when CUDA starts.
const bool kEnvironment = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0;

// Longer than any call here takes, shorter than a test may hang.
constexpr int kPatientMs = 30'000, kKillMs = 1500, kSeconds = 120;
constexpr int kVictim = 1;

// --- In the processes: empty, or what is wrong -------------------------------------------------------

std::string same_bits(const StartedRank& started) {
  const int ranks = started.world->size();
  std::uint64_t seed = 100;
  for (const test::Feature& f : test::rank_features()) {
    const LayerTensors tensors = test::make_tensors(51, f.spec());
    for (const RankReduction reduction : {RankReduction::kPerRank, RankReduction::kPerSlot}) {
      const auto options = test::options_of(engines_of(ranks, reduction), started.world);
      const std::string wrong = test::compare_engines(test::maker_of(tensors), options, true,
                                                      seed += 10, tensors.spec.hidden_size);
      if (!wrong.empty()) return fmt::format("{}: {}", f.name, wrong);
    }
  }
  return "";
}

std::string graphs(const StartedRank& started) {
  const LayerTensors tensors = test::make_tensors(52, test::deepseek_like());
  const auto combo = engines_of(started.world->size(), RankReduction::kPerSlot);
  return test::replay_in_any_order(test::maker_of(tensors), test::options_of(combo, started.world),
                                   tensors.spec.hidden_size, 100);
}

std::int64_t free_bytes() {
  std::size_t free = 0, all = 0;
  return cudaMemGetInfo(&free, &all) == cudaSuccess ? static_cast<std::int64_t>(free) : 0;
}

// Calls until somebody is missing. Then the report names that rank, the outputs are NaN, and the device
// goes on working here.
std::string calls_until_one_dies(const StartedRank& started) {
  const LayerTensors tensors = test::make_tensors(54, test::deepseek_like());
  FusedMoE::Options o =
      test::options_of(engines_of(started.world->size(), RankReduction::kPerRank), started.world);
  o.ranks.engine = RankEngine::kPeerWindows;
  {
    const auto layer = test::maker_of(tensors)(o);
    if (!layer.ok()) return layer.status().to_string();
    RankCalls calls(500, tensors.spec.hidden_size, 1);
    Status status = started.world->barrier("ready");
    if (!status.ok()) return status.to_string();
    started.ready();
    if (started.task == "idle" && started.world->rank() == kVictim) {
      for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kSeconds / 2);
    const bool leaves = started.task == "teardown" && started.world->rank() == kVictim;
    for (int call = 0; layer->health().ok() && !(leaves && call == 3); ++call) {
      if (std::chrono::steady_clock::now() > end) return "nobody was missed";
      calls.poison();
      status = calls.enqueue(*layer, 0, 3);
      if (!calls.finish()) return "the device has failed";
      if (!status.ok() && layer->health().ok()) return status.to_string();
    }
    if (leaves) return "";
    const std::string report = layer->health().to_string();
    if (report.find(fmt::format("rank(s) {},", kVictim)) == std::string::npos) return report;
    if (!calls.all_nan(0, 3)) return "rows of a call that has ended";
    status = calls.enqueue(*layer, 0, 3);
    if (status.ok()) return "a call after the end";
  }
  // The window is closed; a layer of this rank alone.
  FusedMoE::Options alone = test::on_gpu(test::kMostRows);
  alone.device = o.device;
  const auto layer = test::maker_of(tensors)(alone);
  if (!layer.ok()) return layer.status().to_string();
  RankCalls calls(501, tensors.spec.hidden_size, 1);
  const Status status = calls.enqueue(*layer, 0, 3);
  if (!status.ok()) return status.to_string();
  return calls.finish() && !calls.all_nan(0, 3) ? "" : "the device does not work any more";
}

// Windows come and go, and leave no memory behind.
std::string memory(const StartedRank& started) {
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  Communicator& world = *started.world;
  std::int64_t before = 0;
  for (int round = 0; round < 8; ++round) {
    const auto window =
        parallel::make_peer_window(world, test::device_of_rank(world.rank()), kBytes, {});
    if (!window.ok()) return window.status().to_string();
    int here = 0;  // ranks on this one's GPU
    for (int r = 0; r < world.size(); ++r) {
      here += test::device_of_rank(r) == test::device_of_rank(world.rank()) ? 1 : 0;
    }
    if ((*window)->shares_device() != (here > 1)) return "who shares a GPU is not known";
    for (int r = 0; r < world.size(); ++r) {
      // The bytes of the other side, by the rank that has it.
      const auto value = static_cast<unsigned char>(16 * round + world.rank());
      if (cudaMemset((*window)->base(r) + world.rank() * 256, value, 256) != cudaSuccess)
        return "a window cannot be written to";
    }
    if (cudaDeviceSynchronize() != cudaSuccess) return "a window cannot be written to";
    Status met = world.barrier("written");
    for (int r = 0; r < world.size() && met.ok(); ++r) {
      unsigned char got[256] = {};
      const std::byte* const at = (*window)->base(world.rank()) + r * 256;
      if (cudaMemcpy(got, at, sizeof(got), cudaMemcpyDeviceToHost) != cudaSuccess) return "read";
      if (got[0] != 16 * round + r || got[255] != got[0]) return fmt::format("not of rank {}", r);
    }
    met = world.barrier("read");
    if (!met.ok()) return met.to_string();
    if (round == 0) before = free_bytes();
  }
  // Of the last round.
  const Status met = world.barrier("all are gone");
  if (!met.ok()) return met.to_string();
  const std::int64_t lost = before - free_bytes();
  return lost < kBytes ? "" : fmt::format("{} bytes are lost", lost);
}

// One rank cannot: all are refused, and told who.
std::string refusal(const StartedRank& started) {
  const int rank = started.world->rank();
  const Status mine = rank == 1 ? Status(StatusCode::kUnsupported, "not today") : Status();
  const auto window =
      parallel::make_peer_window(*started.world, test::device_of_rank(rank), 4096, mine);
  const std::string want = rank == 1 ? "not today" : "rank 1 cannot, its own message says why";
  if (window.ok() || window.status().code() != StatusCode::kUnsupported) return "not refused";
  return window.status().message().find(want) == std::string::npos ? window.status().to_string()
                                                                   : "";
}

int run_rank(const StartedRank& started) {
  test::use_device_of_rank(started.world->rank());
  const std::string wrong = started.task == "bits"      ? same_bits(started)
                            : started.task == "graphs"  ? graphs(started)
                            : started.task == "memory"  ? memory(started)
                            : started.task == "refusal" ? refusal(started)
                                                        : calls_until_one_dies(started);
  if (wrong.empty() && !testing::Test::HasFailure()) return 0;
  fmt::print(stderr, "process of rank {}: {}\n", started.world->rank(), wrong);
  return 1;
}

// --- In the test ----------------------------------------------------------------------------------------

TEST(CudaProcessRanks, HaveTheBitsOfMessages) {
  REQUIRE_HOPPER();
  for (const int ranks : {2, 3}) {
    RankProcesses processes("bits", ranks, kPatientMs);
    for (int r = 0; r < ranks; ++r) EXPECT_EQ(processes.join(r, kSeconds), 0) << ranks << " " << r;
  }
}

TEST(CudaProcessRanks, GraphsOfDifferentSizesInterleave) {
  REQUIRE_HOPPER();
  RankProcesses processes("graphs", 2, kPatientMs);
  for (int r = 0; r < 2; ++r) EXPECT_EQ(processes.join(r, kSeconds), 0) << r;
}

TEST(CudaProcessRanks, WindowsAreFreed) {
  REQUIRE_HOPPER();
  RankProcesses processes("memory", 3, kPatientMs);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(processes.join(r, kSeconds), 0) << r;
}

TEST(CudaProcessRanks, ARefusalIsThatOfAll) {
  REQUIRE_HOPPER();
  RankProcesses processes("refusal", 3, kPatientMs);
  for (int r = 0; r < 3; ++r) EXPECT_EQ(processes.join(r, kSeconds), 0) << r;
}

// Before its calls, anywhere in them, or while it lets go of the layer (MOESAIC_KILLS: how often).
TEST(CudaProcessRanks, AKilledRankIsReportedAndTheOthersLive) {
  REQUIRE_HOPPER();
  constexpr int kRanks = 3;
  const char* const more = std::getenv("MOESAIC_KILLS");
  const int kills = more != nullptr ? std::atoi(more) : 3;
  test::Rng rng(static_cast<std::uint64_t>(kills));
  for (int k = 0; k < kills; ++k) {
    constexpr const char* kTasks[] = {"idle", "teardown", "calls", "calls", "calls"};
    const char* const task = kTasks[k % 5];
    RankProcesses processes(task, kRanks, kKillMs);
    ASSERT_TRUE(processes.await_all(kSeconds)) << "kill " << k;
    const std::uint64_t most = std::string_view(task) == "teardown" ? 20'000 : 100'000;
    const auto after = std::chrono::microseconds(rng.next() % most);
    std::this_thread::sleep_for(after);
    processes.kill(kVictim);
    for (const int r : {0, 2}) {
      ASSERT_EQ(processes.join(r, kSeconds), 0)
          << "rank " << r << ", kill " << k << " after " << after.count() << " us";
    }
    const int victim = processes.join(kVictim, kSeconds);
    EXPECT_TRUE(victim == -1 || (victim == 0 && std::string_view(task) == "teardown")) << victim;
  }
}

}  // namespace
}  // namespace moesaic

int main(int argc, char** argv) {
  if (const auto started = moesaic::test::started_rank()) return moesaic::run_rank(*started);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
