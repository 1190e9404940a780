// The layer over ranks that are processes, each on a GPU of its own as far as there are some, through
// peer windows: the bits of messages, in graphs too, and what is left when one of them is killed. Each
// process is this program again.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "layer/peer_calls.h"
#include "parallel/garbling_communicator.h"
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
constexpr int kPatientMs = 30'000, kKillMs = 1500, kSeconds = 240;
constexpr int kVictim = 1;

// --- In the processes: empty, or what is wrong -------------------------------------------------------

// Tasks of this name in front are done with windows of NCCL.
constexpr std::string_view kNccl = "nccl ";

std::string same_bits(const StartedRank& started, PeerMemory memory) {
  const int ranks = started.world->size();
  std::uint64_t seed = 100;
  for (const test::Feature& f : test::rank_features()) {
    const LayerTensors tensors = test::make_tensors(51, f.spec());
    for (const RankReduction reduction : {RankReduction::kPerRank, RankReduction::kPerSlot}) {
      auto options = test::options_of(engines_of(ranks, reduction), started.world);
      options.ranks.peer_memory = memory;
      const std::string wrong = test::compare_engines(test::maker_of(tensors), options, true,
                                                      seed += 10, tensors.spec.hidden_size);
      if (!wrong.empty()) return fmt::format("{}: {}", f.name, wrong);
    }
  }
  return "";
}

std::string graphs(const StartedRank& started, PeerMemory memory) {
  const LayerTensors tensors = test::make_tensors(52, test::deepseek_like());
  auto options =
      test::options_of(engines_of(started.world->size(), RankReduction::kPerSlot), started.world);
  options.ranks.peer_memory = memory;
  return test::replay_in_any_order(test::maker_of(tensors), options, tensors.spec.hidden_size, 100);
}

std::int64_t free_bytes() {
  std::size_t free = 0, all = 0;
  return cudaMemGetInfo(&free, &all) == cudaSuccess ? static_cast<std::int64_t>(free) : 0;
}

// A layer of this rank alone, when the windows are closed.
std::string works_alone(const LayerTensors& tensors, Device device) {
  FusedMoE::Options alone = test::on_gpu(test::kMostRows);
  alone.device = device;
  const auto layer = test::maker_of(tensors)(alone);
  if (!layer.ok()) return layer.status().to_string();
  RankCalls calls(501, tensors.spec.hidden_size, 1);
  const Status status = calls.enqueue(*layer, 0, 3);
  if (!status.ok()) return status.to_string();
  return calls.finish() && !calls.all_nan(0, 3) ? "" : "the device does not work any more";
}

// Calls until somebody is missing. Then the report names that rank, the outputs are NaN, and the device
// goes on working here.
std::string calls_until_one_dies(const StartedRank& started, PeerMemory memory) {
  const LayerTensors tensors = test::make_tensors(54, test::deepseek_like());
  FusedMoE::Options o =
      test::options_of(engines_of(started.world->size(), RankReduction::kPerRank), started.world);
  o.ranks.engine = RankEngine::kPeerWindows;
  o.ranks.peer_memory = memory;
  {
    const bool early = started.task == "creation";
    if (early) started.ready();
    const auto layer = test::maker_of(tensors)(o);
    if (!layer.ok()) return early ? works_alone(tensors, o.device) : layer.status().to_string();
    RankCalls calls(500, tensors.spec.hidden_size, 1);
    Status status = started.world->barrier("ready");
    if (early && !status.ok()) return "";
    if (!status.ok()) return status.to_string();
    if (!early) started.ready();
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
  return works_alone(tensors, o.device);
}

// Windows come and go, and leave no memory behind.
std::string come_and_go(const StartedRank& started, PeerMemory memory) {
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  constexpr int kRounds = 20;
  Communicator& world = *started.world;
  std::int64_t before = 0;
  std::chrono::duration<double, std::milli> making{};
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    const auto window =
        parallel::make_peer_window(world, test::device_of_rank(world.rank()), kBytes, {}, memory);
    if (!window.ok()) return window.status().to_string();
    if (round > 0) making += std::chrono::steady_clock::now() - begin;
    int here = 0;  // ranks on this one's GPU
    for (int r = 0; r < world.size(); ++r) {
      here += test::device_of_rank(r) == test::device_of_rank(world.rank()) ? 1 : 0;
    }
    if ((*window)->shares_device() != (here > 1)) return "who shares a GPU is not known";
    for (int r = 0; r < world.size(); ++r) {
      // The bytes of the other side, by the rank that has it.
      const auto value = static_cast<unsigned char>(8 * round + world.rank());
      if (cudaMemset((*window)->base(r) + world.rank() * 256, value, 256) != cudaSuccess)
        return "a window cannot be written to";
    }
    if (cudaDeviceSynchronize() != cudaSuccess) return "a window cannot be written to";
    Status met = world.barrier("written");
    for (int r = 0; r < world.size() && met.ok(); ++r) {
      unsigned char got[256] = {};
      const std::byte* const at = (*window)->base(world.rank()) + r * 256;
      if (cudaMemcpy(got, at, sizeof(got), cudaMemcpyDeviceToHost) != cudaSuccess) return "read";
      if (got[0] != 8 * round + r || got[255] != got[0]) return fmt::format("not of rank {}", r);
    }
    met = world.barrier("read");
    if (!met.ok()) return met.to_string();
    if (round == 0) before = free_bytes();
  }
  // Of the last round.
  const Status met = world.barrier("all are gone");
  if (!met.ok()) return met.to_string();
  if (world.rank() == 0) {
    fmt::print("memory {}: {:.1f} ms to make a window\n", peer_memory_name(memory),
               making.count() / (kRounds - 1));
  }
  const std::int64_t lost = before - free_bytes();
  return lost < kBytes ? "" : fmt::format("{} bytes are lost", lost);
}

// One rank cannot: all are refused, and told who.
std::string refusal(const StartedRank& started, PeerMemory memory) {
  const int rank = started.world->rank();
  const Status mine = rank == 1 ? Status(StatusCode::kUnsupported, "not today") : Status();
  const auto window =
      parallel::make_peer_window(*started.world, test::device_of_rank(rank), 4096, mine, memory);
  const std::string want = rank == 1 ? "not today" : "rank 1 cannot, its own message says why";
  if (window.ok() || window.status().code() != StatusCode::kUnsupported) return "not refused";
  return window.status().message().find(want) == std::string::npos ? window.status().to_string()
                                                                   : "";
}

// Rank 1 cannot open the others' memory: all are refused, and nobody's memory is kept.
std::string unopened(const StartedRank& started) {
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  Communicator& world = *started.world;
  test::GarblingCommunicator garbled(world, sizeof(cudaIpcMemHandle_t));
  Communicator& told = world.rank() == 1 ? garbled : world;
  std::int64_t before = 0;
  for (int round = 0; round < 4; ++round) {
    const auto window = parallel::make_peer_window(told, test::device_of_rank(world.rank()), kBytes,
                                                   {}, PeerMemory::kCudaHandles);
    if (window.ok() || window.status().code() != StatusCode::kUnsupported) return "not refused";
    const std::string_view want = world.rank() == 1 ? "the window of rank 0" : "rank 1 cannot";
    if (window.status().message().find(want) == std::string::npos)
      return window.status().to_string();
    const Status met = world.barrier("all are gone");
    if (!met.ok()) return met.to_string();
    if (round == 0) before = free_bytes();
  }
  const std::int64_t lost = before - free_bytes();
  return lost < kBytes ? works_alone(test::make_tensors(54, test::deepseek_like()),
                                     Device::cuda(test::device_of_rank(world.rank())))
                       : fmt::format("{} bytes are lost", lost);
}

// Ranks that ask for different memory: all are refused.
std::string different(const StartedRank& started) {
  const int rank = started.world->rank();
  const auto window =
      parallel::make_peer_window(*started.world, test::device_of_rank(rank), 4096, {},
                                 rank == 1 ? PeerMemory::kCudaHandles : PeerMemory::kAuto);
  if (window.ok() || window.status().code() != StatusCode::kInvalidArgument) return "not refused";
  const std::string_view want = "peer_memory: got auto on rank 0 and cuda_handles on rank 1";
  return window.status().message().find(want) == std::string::npos ? window.status().to_string()
                                                                   : "";
}

// Of the GPUs that this process may use, the rank's only; before CUDA starts.
void hide_other_gpus(int rank) {
  const char* const all = std::getenv("CUDA_VISIBLE_DEVICES");
  std::string own = std::to_string(rank);
  if (all != nullptr) {
    std::istringstream list(all);
    for (int r = 0; r <= rank; ++r) std::getline(list, own, ',');
  }
  setenv("CUDA_VISIBLE_DEVICES", own.c_str(), 1);
}

// Processes that do not see each other's GPUs: windows of NCCL, unless there are CUDA's handles.
std::string own_gpu_only(const StartedRank& started) {
  const auto windows = [&](PeerMemory memory) {
    return parallel::make_peer_window(*started.world, 0, 4096, {}, memory);
  };
  const bool handles = windows(PeerMemory::kCudaHandles).ok();
  {
    const auto window = windows(PeerMemory::kAuto);
    if (!window.ok()) return window.status().to_string();
    const auto want =
        handles ? parallel::PeerProvider::kCudaHandles : parallel::PeerProvider::kNccl;
    const std::string_view got = parallel::peer_provider_name((*window)->provider());
    fmt::print("rank {}: windows of {}\n", started.world->rank(), got);
    if (got != parallel::peer_provider_name(want)) return fmt::format("windows of {}", got);
  }
  return same_bits(started, PeerMemory::kAuto);
}

std::string run_task(const StartedRank& started, PeerMemory memory) {
  if (started.task == "bits") return same_bits(started, memory);
  if (started.task == "graphs") return graphs(started, memory);
  if (started.task == "memory") return come_and_go(started, memory);
  if (started.task == "refusal") return refusal(started, memory);
  if (started.task == "unopened") return unopened(started);
  if (started.task == "different") return different(started);
  if (started.task == "own GPU") return own_gpu_only(started);
  return calls_until_one_dies(started, memory);
}

int run_rank(StartedRank started) {
  if (started.task == "own GPU") hide_other_gpus(started.world->rank());
  test::use_device_of_rank(started.world->rank());
  const bool nccl = started.task.starts_with(kNccl);
  if (nccl) started.task.erase(0, kNccl.size());
  const std::string wrong = run_task(started, nccl ? PeerMemory::kNccl : PeerMemory::kAuto);
  if (wrong.empty() && !testing::Test::HasFailure()) return 0;
  fmt::print(stderr, "process of rank {}: {}\n", started.world->rank(), wrong);
  return 1;
}

// --- In the test ----------------------------------------------------------------------------------------

void expect_done(const std::string& task, int ranks) {
  RankProcesses processes(task, ranks, kPatientMs);
  for (int r = 0; r < ranks; ++r) EXPECT_EQ(processes.join(r, kSeconds), 0) << ranks << " " << r;
}

// `kills` times: the victim is killed at some moment of tasks in turn; the others must end well.
void kill_in(const std::string& memory, const std::vector<std::string>& tasks, int ranks,
             int timeout_ms, int kills) {
  test::Rng rng(static_cast<std::uint64_t>(kills));
  for (int k = 0; k < kills; ++k) {
    const std::string& task = tasks[static_cast<std::size_t>(k) % tasks.size()];
    RankProcesses processes(memory + task, ranks, timeout_ms);
    ASSERT_TRUE(processes.await_all(kSeconds)) << "kill " << k;
    const std::uint64_t most = task == "teardown"   ? 20'000
                               : task == "creation" ? 4'000'000
                                                    : 100'000;
    const auto after = std::chrono::microseconds(rng.next() % most);
    std::this_thread::sleep_for(after);
    processes.kill(kVictim);
    for (int r = 0; r < ranks; ++r) {
      if (r == kVictim) continue;
      ASSERT_EQ(processes.join(r, kSeconds), 0)
          << "rank " << r << ", kill " << k << ", " << task << ", after " << after.count() << " us";
    }
    const int victim = processes.join(kVictim, kSeconds);
    EXPECT_TRUE(victim == -1 || (victim == 0 && task == "teardown")) << victim;
  }
}

// How often, by MOESAIC_KILLS.
int number_of_kills(int otherwise) {
  const char* const more = std::getenv("MOESAIC_KILLS");
  return more != nullptr ? std::atoi(more) : otherwise;
}
// Before its calls, anywhere in them, or while it lets go of the layer.
const std::vector<std::string>& moments() {
  static const std::vector<std::string> all = {"idle", "teardown", "calls", "calls", "calls"};
  return all;
}

TEST(CudaProcessRanks, HaveTheBitsOfMessages) {
  REQUIRE_HOPPER();
  for (const int ranks : {2, 3}) expect_done("bits", ranks);
}

TEST(CudaProcessRanks, GraphsOfDifferentSizesInterleave) {
  REQUIRE_HOPPER();
  expect_done("graphs", 2);
}

TEST(CudaProcessRanks, WindowsAreFreed) {
  REQUIRE_HOPPER();
  expect_done("memory", 3);
}

TEST(CudaProcessRanks, WindowsThatCannotBeOpenedAreFreed) {
  REQUIRE_HOPPER();
  expect_done("unopened", 3);
}

TEST(CudaProcessRanks, ARefusalIsThatOfAll) {
  REQUIRE_HOPPER();
  expect_done("refusal", 3);
  expect_done("different", 3);
}

TEST(CudaProcessRanks, AKilledRankIsReportedAndTheOthersLive) {
  REQUIRE_HOPPER();
  kill_in("", moments(), 3, kKillMs, number_of_kills(3));
}

// The same with windows of NCCL, which need a GPU for each rank.
class NcclProcessRanks : public testing::Test {
 protected:
  void SetUp() override {
    REQUIRE_HOPPER();
    const std::string reason = test::why_no_nccl_windows();
    if (!reason.empty()) GTEST_SKIP() << reason;
    ranks_ = std::min(3, static_cast<int>(test::usable_devices().size()));
  }
  // To make windows of NCCL takes seconds, all of which the time-out must allow.
  static constexpr int kNcclKillMs = 10'000;
  int ranks_ = 2;
};

TEST_F(NcclProcessRanks, HaveTheBitsOfMessages) { expect_done("nccl bits", ranks_); }

TEST_F(NcclProcessRanks, GraphsOfDifferentSizesInterleave) { expect_done("nccl graphs", ranks_); }

TEST_F(NcclProcessRanks, WindowsAreFreed) { expect_done("nccl memory", ranks_); }

TEST_F(NcclProcessRanks, ARefusalIsThatOfAll) { expect_done("nccl refusal", ranks_); }

TEST_F(NcclProcessRanks, ServeWhereAProcessSeesItsOwnGpuOnly) { expect_done("own GPU", ranks_); }

TEST_F(NcclProcessRanks, AKilledRankIsReportedAndTheOthersLive) {
  kill_in(std::string(kNccl), moments(), ranks_, kNcclKillMs, number_of_kills(3));
}

TEST_F(NcclProcessRanks, ARankKilledWhileWindowsAreMadeHoldsUpNobody) {
  kill_in(std::string(kNccl), {"creation"}, ranks_, kNcclKillMs, number_of_kills(3));
}

}  // namespace
}  // namespace moesaic

int main(int argc, char** argv) {
  if (const auto started = moesaic::test::started_rank()) return moesaic::run_rank(*started);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
