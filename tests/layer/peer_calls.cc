#include "layer/peer_calls.h"

#include <fmt/format.h>

#include <chrono>
#include <thread>
#include <utility>

namespace moesaic::test {

int device_of_rank(int rank) {
  static const std::vector<int> devices = usable_devices();
  return devices[static_cast<std::size_t>(rank) % devices.size()];
}

void use_device_of_rank(int rank) { EXPECT_EQ(cudaSetDevice(device_of_rank(rank)), cudaSuccess); }

FusedMoE::Options options_of(const RankCombo& c, const std::shared_ptr<Communicator>& world) {
  const int rank = world->rank();
  ParallelSizes sizes;
  sizes.tp_size = c.tp;
  sizes.tp_rank = rank % c.tp;
  sizes.pcp_size = c.pcp;
  sizes.pcp_rank = rank / c.tp % c.pcp;
  sizes.dp_size = c.dp;
  sizes.dp_rank = rank / c.tp / c.pcp;
  sizes.enable_expert_parallel = c.ep;
  sizes.sequence_parallel = c.sp;
  FusedMoE::Options o = on_gpu(kMostRows);
  o.device = Device::cuda(device_of_rank(rank));
  o.parallel = ParallelConfig::from_sizes(sizes).value();
  o.parallel.placement = c.placement;
  o.ranks.communicator = world;
  o.ranks.transport = c.transport;
  o.ranks.reduction = c.reduction;
  return o;
}

RankCombo engines_of(int ranks, RankReduction reduction) {
  RankCombo c;
  c.dp = ranks;
  c.ep = true;
  c.transport = RankTransport::kAllToAll;
  c.reduction = reduction;
  return c;
}

std::string why_no_nccl_windows() {
  const std::size_t devices = usable_devices().size();
  if (devices < 2) return fmt::format("{} usable GPU(s), need one for each of two ranks", devices);
  return nccl_windows_available().message();
}

std::int64_t rows_of(int rank, int call) {
  return (rank * 5 + call * 3 + rank * call) % (kMostRows + 1);
}

std::string compare_engines(const MakeRankLayer& make, FusedMoE::Options options, bool fits,
                            std::uint64_t seed, std::int64_t hidden) {
  constexpr int kCalls = 4;
  const int rank = options.ranks.communicator->rank();
  options.ranks.engine = RankEngine::kPeerWindows;
  const auto peers = make(options);
  if (!fits) {
    const bool refused = !peers.ok() && peers.status().code() == StatusCode::kUnsupported;
    return refused ? "" : "not refused: " + peers.status().to_string();
  }
  if (!peers.ok()) return peers.status().to_string();
  const PeerMemory memory = std::exchange(options.ranks.peer_memory, PeerMemory::kAuto);
  options.ranks.engine = RankEngine::kMessages;
  const auto messages = make(options);
  if (!messages.ok()) return messages.status().to_string();
  const std::string named = memory == PeerMemory::kAuto ? "through peer windows"
                                                        : fmt::format("through peer windows ({})",
                                                                      peer_memory_name(memory));
  if (peers->summary().find(named) == std::string::npos) return peers->summary();
  RankCalls calls(seed + static_cast<std::uint64_t>(rank), hidden, kCalls);
  for (int c = 0; c < kCalls; ++c) {
    const Status status = calls.enqueue(*messages, c, rows_of(rank, c));
    if (!status.ok()) return status.to_string();
  }
  if (!calls.finish()) return "messages failed";
  calls.keep();
  calls.poison();
  if (!calls.finish()) return "poison";
  // No rank waits on the device before all are there.
  Status status = options.ranks.communicator->barrier("ready");
  for (int c = 0; c < kCalls && status.ok(); ++c) {
    status = calls.enqueue(*peers, c, rows_of(rank, c));
  }
  if (!status.ok()) return status.to_string();
  if (!calls.finish()) return "peer windows failed";
  std::string wrong = peers->health().to_string();
  if (peers->health().ok()) wrong.clear();
  for (int c = 0; c < kCalls; ++c) {
    if (!calls.same(c, rows_of(rank, c))) wrong += fmt::format(" other bits in call {}", c);
  }
  // Nobody frees memory while another is still in a call.
  status = options.ranks.communicator->barrier("done");
  return status.ok() ? wrong : status.to_string();
}

std::string replay_in_any_order(const MakeRankLayer& make, FusedMoE::Options o, std::int64_t hidden,
                                int rounds) {
  constexpr int kGraphs = 3;
  const std::shared_ptr<Communicator> world = o.ranks.communicator;
  const int rank = world->rank();
  o.ranks.engine = RankEngine::kPeerWindows;
  const auto layer = make(o);
  if (!layer.ok()) return layer.status().to_string();
  RankCalls calls(300 + static_cast<std::uint64_t>(rank), hidden, kGraphs);
  const auto rows = [&](int g) { return rows_of(rank, g + 1); };
  Status status = world->barrier("ready");
  for (int g = 0; g < kGraphs && status.ok(); ++g) {
    status = calls.enqueue(*layer, g, rows(g));
  }
  if (!status.ok()) return status.to_string();
  if (!calls.finish() || !layer->health().ok()) return layer->health().to_string();
  calls.keep();
  status = world->barrier("captures");
  for (int g = 0; g < kGraphs && status.ok(); ++g) {
    status = calls.capture(*layer, g, rows(g));
  }
  if (status.ok()) status = world->barrier("replays");
  if (!status.ok()) return status.to_string();
  Rng rng(7 + static_cast<std::uint64_t>(rank));
  calls.poison();
  for (int round = 0; round < rounds && status.ok(); ++round) {
    const auto g = static_cast<int>(rng.next() % kGraphs);
    if (rng.next() % 8 == 0) {
      status = calls.enqueue(*layer, g, rows(g));
    } else {
      calls.replay(static_cast<std::size_t>(g));
    }
    // Launches wait in a queue with an end; nobody fills it while others sleep.
    if (round % 16 == 15 && !calls.finish()) return "replays failed";
    if (rng.next() % 64 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(rng.next() % 500));
    }
  }
  if (!status.ok()) return status.to_string();
  if (!calls.finish()) return "replays failed";
  if (!layer->health().ok()) return layer->health().to_string();
  std::string bad;
  for (int g = 0; g < kGraphs; ++g) {
    if (!calls.same(g, rows(g))) bad += fmt::format(" other bits in graph {}", g);
  }
  status = world->barrier("done");
  return status.ok() ? bad : status.to_string();
}

}  // namespace moesaic::test
