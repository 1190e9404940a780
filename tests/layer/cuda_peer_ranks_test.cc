// The layer over ranks through peer windows: threads that wait for each other on the GPUs that there
// are, several on each where they are fewer. The bits are those of messages, eager, replayed and in graphs of different sizes. Skipped,
// visibly, without a device.
#include <cuda_runtime.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "layer/cuda_rank_case.h"
#include "layer/eplb_case.h"
#include "layer/peer_calls.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::compare_engines;
using test::DeviceBytes;
using test::engines_of;
using test::expect_refusal;
using test::kMostRows;
using test::LayerTensors;
using test::options_of;
using test::RankCalls;
using test::RankCombo;
using test::rows_of;

// Read when CUDA starts: before any test.
const bool kEnvironment = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0 &&
                          setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

// Longer than any call here takes, shorter than a test may hang.
constexpr int kPatientMs = 20'000;

// body(rank, world) on a thread for each rank; what is wrong.
std::string on_ranks(
    int ranks, int timeout_ms,
    const std::function<std::string(int, const std::shared_ptr<Communicator>&)>& body) {
  auto worlds = make_in_process_communicators(ranks, {.timeout_ms = timeout_ms}).value();
  std::vector<std::string> wrong(worlds.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < worlds.size(); ++r) {
    threads.emplace_back([&, r, world = std::shared_ptr<Communicator>(std::move(worlds[r]))] {
      test::use_device_of_rank(static_cast<int>(r));
      wrong[r] = body(static_cast<int>(r), world);
    });
  }
  for (std::thread& t : threads) t.join();
  std::string text;
  for (std::size_t r = 0; r < wrong.size(); ++r) {
    if (!wrong[r].empty()) text += fmt::format("rank {}: {}\n", r, wrong[r]);
  }
  return text;
}

bool fits_peers(const FusedMoE::Options& options, std::int64_t top_k) {
  const bool travels = options.ranks.transport != RankTransport::kNone &&
                       options.ranks.transport != RankTransport::kBatched;
  const bool rows_differ = options.parallel.token_group().size() > 1;
  if (options.ranks.transport == RankTransport::kGather && top_k > 1 &&
      options.ranks.reduction_in_force() == RankReduction::kPerSlot) {
    return false;  // slots of all ranks' rows, by messages only
  }
  return travels && options.parallel.replica_group().size() == 1 && rows_differ;
}

TEST(CudaPeerRanks, EveryCombinationHasTheBitsOfMessages) {
  REQUIRE_HOPPER();
  int runs = 0, refusals = 0;
  std::uint64_t seed = 100;
  for (const test::Feature& f : test::rank_features()) {
    const LayerTensors tensors = test::make_tensors(51, f.spec());
    const test::MakeRankLayer make = test::maker_of(tensors);
    for (const int ranks : {2, 4}) {
      for (const RankCombo& combo : test::rank_combos(ranks)) {
        if (!test::runs_on_gpus(combo, tensors.spec)) continue;
        for (const DType back : {DType::kF32, DType::kBF16}) {
          // Only partial sums that travel are rounded.
          if (back == DType::kBF16 && (combo.reduction == RankReduction::kPerSlot ||
                                       combo.transport == RankTransport::kNone)) {
            continue;
          }
          bool fits = false;
          const std::string wrong = on_ranks(
              ranks, kPatientMs, [&](int rank, const std::shared_ptr<Communicator>& world) {
                FusedMoE::Options o = options_of(combo, world);
                o.ranks.combine_dtype = back;
                const bool mine = fits_peers(o, tensors.spec.routing.top_k);
                if (rank == 0) fits = mine;
                return compare_engines(make, o, mine, seed, tensors.spec.hidden_size);
              });
          ASSERT_EQ(wrong, "") << f.name << " " << combo.name() << " " << dtype_name(back);
          ++(fits ? runs : refusals);
          seed += 10;
        }
      }
    }
  }
  RecordProperty("runs", runs);
  RecordProperty("refusals", refusals);
  EXPECT_GT(runs, 60);
  EXPECT_GT(refusals, 10);
}

TEST(CudaPeerRanks, GraphsOfDifferentSizesInterleave) {
  REQUIRE_HOPPER();
  for (const test::Feature& f : test::rank_features()) {
    const LayerTensors tensors = test::make_tensors(52, f.spec());
    const test::MakeRankLayer make = test::maker_of(tensors);
    for (const int ranks : {2, 4}) {
      const RankCombo combo =
          engines_of(ranks, ranks == 2 ? RankReduction::kPerRank : RankReduction::kPerSlot);
      const std::string wrong =
          on_ranks(ranks, kPatientMs, [&](int, const std::shared_ptr<Communicator>& world) {
            return test::replay_in_any_order(make, options_of(combo, world),
                                             tensors.spec.hidden_size, 400);
          });
      ASSERT_EQ(wrong, "") << f.name << " " << ranks;
    }
  }
}

// A captured call goes by the maps and the weights of the day that it is replayed on, with the bits of
// the day before, and counts its load there.
std::string graphs_while_experts_move(int ranks, PeerMemory memory) {
  constexpr int kReplays = 3;
  const LayerTensors tensors = test::make_tensors(56, test::eplb_spec());
  return on_ranks(
      ranks, kPatientMs, [&](int rank, const std::shared_ptr<Communicator>& world) -> std::string {
        FusedMoE::Options o = options_of(engines_of(ranks, RankReduction::kPerSlot), world);
        o.ranks.engine = RankEngine::kPeerWindows;
        o.ranks.peer_memory = memory;
        o.ranks.enable_eplb = true;
        o.ranks.num_redundant_experts = 4;
        auto layer = FusedMoE::create(tensors.weights(), o);
        if (!layer.ok()) return layer.status().to_string();
        const bool nccl = memory == PeerMemory::kNccl;
        const char* const windows =
            nccl ? "through peer windows (nccl" : "through peer windows (thr";
        if (layer->summary().find(windows) == std::string::npos) return layer->summary();
        RankCalls calls(600 + static_cast<std::uint64_t>(rank), tensors.spec.hidden_size, 1);
        const std::int64_t rows = rows_of(rank, 1);
        Status status = world->barrier("ready");
        if (status.ok()) status = calls.enqueue(*layer, 0, rows);
        if (!status.ok() || !calls.finish()) return "first call: " + status.to_string();
        calls.keep();
        status = world->barrier("capture");
        if (status.ok()) status = calls.capture(*layer, 0, rows);
        if (!status.ok()) return status.to_string();
        std::vector<std::vector<double>> loads;
        for (std::uint64_t day = 0; day < 4; ++day) {
          const std::vector<std::int32_t> before = layer->physical_to_logical();
          status = layer->begin_rearrange(test::random_map(day, 12, 16));
          for (bool done = false; status.ok() && !done;) {
            const auto moved = layer->continue_rearrange(2);
            status = moved.ok() ? Status() : moved.status();
            done = moved.ok() && *moved;
          }
          if (!status.ok()) return status.to_string();
          if (layer->physical_to_logical() == before) return "nothing moved";
          for (int r = 0; r < kReplays && status.ok(); ++r) {
            calls.poison();
            if (!calls.finish()) return "poison";
            status = world->barrier("replay");
            calls.replay(0);
            if (!calls.finish()) return "replay failed";
            if (!layer->health().ok()) return layer->health().to_string();
            if (!calls.same(0, rows)) return fmt::format("other bits on day {}", day);
          }
          status = world->barrier("loads");
          const auto load = layer->measured_load();
          if (!load.ok()) return load.status().to_string();
          loads.push_back(*load);
        }
        // One call and three replays a day: the load grows by as much every day.
        for (std::size_t e = 0; e < loads[0].size(); ++e) {
          const double call = loads[0][e] / (1 + kReplays);
          for (std::size_t day = 0; day < loads.size(); ++day) {
            const double calls_so_far = 1 + kReplays * static_cast<double>(day + 1);
            if (loads[day][e] != call * calls_so_far) return fmt::format("other load of {}", e);
          }
        }
        status = world->barrier("done");
        return status.ok() ? "" : status.to_string();
      });
}

TEST(CudaPeerRanks, GraphsStayValidWhenExpertsMove) {
  REQUIRE_HOPPER();
  EXPECT_EQ(graphs_while_experts_move(4, PeerMemory::kAuto), "");
}

TEST(CudaPeerRanks, GraphsStayValidWhenExpertsMoveThroughNccl) {
  REQUIRE_HOPPER();
  const std::string reason = test::why_no_nccl_windows();
  if (!reason.empty()) GTEST_SKIP() << reason;
  EXPECT_EQ(graphs_while_experts_move(2, PeerMemory::kNccl), "");
}

// Host tensors: ranks with rows left and ranks without take every step together.
TEST(CudaPeerRanks, HostTensorsHaveTheBitsOfMessages) {
  REQUIRE_HOPPER();
  for (const test::Feature& f : test::rank_features()) {
    const LayerTensors tensors = test::make_tensors(53, f.spec());
    const test::MakeRankLayer make = test::maker_of(tensors);
    const std::string wrong = on_ranks(
        3, kPatientMs, [&](int rank, const std::shared_ptr<Communicator>& world) -> std::string {
          FusedMoE::Options o = options_of(engines_of(3, RankReduction::kPerRank), world);
          const Tensor x =
              test::random_hidden(400 + static_cast<std::uint64_t>(rank),
                                  rank == 1 ? 0 : 4 + 9 * rank, tensors.spec.hidden_size);
          std::vector<Tensor> outputs;
          for (const RankEngine engine : {RankEngine::kMessages, RankEngine::kAuto}) {
            o.ranks.engine = engine;
            const auto layer = make(o);
            if (!layer.ok()) return layer.status().to_string();
            outputs.push_back(Tensor::zeros(DType::kF32, x.shape()).value());
            for (int repeat = 0; repeat < 2; ++repeat) {
              const Status status = layer->forward(x.view(), outputs.back().view());
              if (!status.ok()) return status.to_string();
            }
            if (engine == RankEngine::kAuto &&
                layer->summary().find("through peer windows") == std::string::npos) {
              return layer->summary();
            }
            const Status status = world->barrier("done");
            if (!status.ok()) return status.to_string();
          }
          std::string why;
          return test::same_bits(outputs[1].view(), outputs[0].view(), &why) ? "" : why;
        });
    EXPECT_EQ(wrong, "") << f.name;
  }
}

// --- Memory of NCCL --------------------------------------------------------------------------------

// A GPU for each rank; another provider, the same bits.
TEST(CudaPeerRanks, WindowsOfNcclHaveTheBitsOfMessages) {
  REQUIRE_HOPPER();
  const std::string reason = test::why_no_nccl_windows();
  if (!reason.empty()) GTEST_SKIP() << reason;
  const int ranks = std::min(4, static_cast<int>(test::usable_devices().size()));
  std::uint64_t seed = 900;
  for (const test::Feature& f : test::rank_features()) {
    const LayerTensors tensors = test::make_tensors(51, f.spec());
    const test::MakeRankLayer make = test::maker_of(tensors);
    for (const RankReduction reduction : {RankReduction::kPerRank, RankReduction::kPerSlot}) {
      const std::string wrong =
          on_ranks(ranks, kPatientMs, [&](int, const std::shared_ptr<Communicator>& world) {
            FusedMoE::Options o = options_of(engines_of(ranks, reduction), world);
            o.ranks.peer_memory = PeerMemory::kNccl;
            return compare_engines(make, o, true, seed, tensors.spec.hidden_size);
          });
      ASSERT_EQ(wrong, "") << f.name;
      seed += 10;
    }
  }
}

// What cannot be had is refused on all ranks, by name; with engine auto rows go by messages.
TEST(CudaPeerRanks, MemoryThatCannotBeHadIsRefused) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = test::make_tensors(58, test::deepseek_like());
  const test::MakeRankLayer make = test::maker_of(tensors);
  const int devices = static_cast<int>(test::usable_devices().size());
  const int ranks = 2 * devices;
  const std::string wrong = on_ranks(
      ranks, kPatientMs, [&](int rank, const std::shared_ptr<Communicator>& world) -> std::string {
        FusedMoE::Options o = options_of(engines_of(ranks, RankReduction::kPerRank), world);
        o.ranks.engine = RankEngine::kPeerWindows;
        o.ranks.peer_memory = PeerMemory::kCudaHandles;
        expect_refusal(make(o).status(), StatusCode::kUnsupported,
                       {"peer_memory: got cuda_handles", "threads of one process"});
        o.ranks.peer_memory = PeerMemory::kNccl;
        const Status shared = make(o).status();
        expect_refusal(shared, StatusCode::kUnsupported, {});
        const bool nccl = nccl_windows_available().ok();
        const std::string pair = fmt::format("ranks 0 and {}, which share a GPU", devices);
        if (nccl && shared.message().find(pair) == std::string::npos) return shared.to_string();
        o.ranks.engine = RankEngine::kAuto;
        {
          const auto layer = make(o);
          if (!layer.ok()) return layer.status().to_string();
          if (layer->summary().find("by messages (") == std::string::npos) return layer->summary();
        }
        o.ranks.engine = RankEngine::kPeerWindows;
        o.ranks.peer_memory = rank == 1 ? PeerMemory::kNccl : PeerMemory::kAuto;
        expect_refusal(make(o).status(), StatusCode::kInvalidArgument,
                       {"peer_memory: got auto on rank 0 and nccl on rank 1"});
        return "";
      });
  EXPECT_EQ(wrong, "");
}

// A window's words have 20 bits for the rows of a call.
TEST(CudaPeerRanks, MoreRowsThanAWindowHoldsAreMessages) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = test::make_tensors(57, test::small_spec());
  const test::MakeRankLayer make = test::maker_of(tensors);
  const std::string wrong =
      on_ranks(2, kPatientMs, [&](int, const std::shared_ptr<Communicator>& world) -> std::string {
        FusedMoE::Options o = options_of(engines_of(2, RankReduction::kPerRank), world);
        o.max_tokens = 1 << 20;
        o.ranks.engine = RankEngine::kPeerWindows;
        expect_refusal(make(o).status(), StatusCode::kLimitExceeded,
                       {"tokens = 1048576, need at most 1048575"});
        o.ranks.engine = RankEngine::kAuto;
        const auto layer = make(o);
        if (!layer.ok()) return layer.status().to_string();
        const bool messages = layer->summary().find("by messages (") != std::string::npos;
        return messages ? "" : layer->summary();
      });
  EXPECT_EQ(wrong, "");
}

// --- Failures --------------------------------------------------------------------------------------

// One of three ranks makes no second call: the others' kernels end, both are told who, their output
// is NaN, and what they call next is refused.
TEST(CudaPeerRanks, AMissingRankIsReportedByAllOthers) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = test::make_tensors(54, test::deepseek_like());
  const test::MakeRankLayer make = test::maker_of(tensors);
  const std::string wrong =
      on_ranks(3, 2000, [&](int rank, const std::shared_ptr<Communicator>& world) -> std::string {
        FusedMoE::Options o = options_of(engines_of(3, RankReduction::kPerRank), world);
        o.ranks.engine = RankEngine::kPeerWindows;
        const auto layer = make(o);
        if (!layer.ok()) return layer.status().to_string();
        RankCalls calls(500, tensors.spec.hidden_size, 2);
        Status status = world->barrier("ready");
        if (status.ok()) status = calls.enqueue(*layer, 0, 3);
        if (!status.ok() || !calls.finish()) return status.to_string();
        if (!layer->health().ok()) return layer->health().to_string();
        status = calls.capture(*layer, 1, 3);
        if (status.ok()) status = world->barrier("second call");
        if (!status.ok()) return status.to_string();
        if (rank != 1) {
          calls.replay(0);
          if (!calls.finish()) return "the device has failed";
          expect_refusal(layer->health(), StatusCode::kDevice,
                         {"dispatch (all_to_all, bf16, fp32 back), call 2", "within 2000 ms",
                          "rank(s) 1, says rank"});
          if (!calls.all_nan(1, 3)) return "no NaN";
          calls.replay(0);  // ends at once
          if (!calls.finish()) return "the device has failed";
          expect_refusal(calls.enqueue(*layer, 1, 3), StatusCode::kDevice, {"rank(s) 1"});
        }
        // By then the others have given up; the rank that comes late hears of it too.
        std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 4500 : 0));
        if (rank == 1) {
          calls.replay(0);
          if (!calls.finish()) return "the device has failed";
          expect_refusal(layer->health(), StatusCode::kDevice, {"rank(s) 1, says rank"});
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 0 : 6000));
        return "";
      });
  EXPECT_EQ(wrong, "");
}

// With room for fewer pairs than there may be a layer has the bits of one with room for all, up to the
// last pair; one more, and the call is refused on all ranks. All slots choose experts of rank 0, so what
// it has is known.
TEST(CudaPeerRanks, ACallWithMorePairsThanThereIsRoomForIsRefusedOnAllRanks) {
  REQUIRE_HOPPER();
  constexpr std::int64_t kRoom = 1024, kMost = 300;
  for (const test::Feature& f : test::rank_features()) {
    if (f.name != "deepseek" && f.name != "deepseek fp8") continue;
    for (const RankReduction reduction : {RankReduction::kPerRank, RankReduction::kPerSlot}) {
      const LayerTensors tensors = test::make_tensors(57, f.spec());
      const test::MakeRankLayer make = test::maker_of(tensors);
      const std::int64_t k = tensors.spec.routing.top_k;
      const std::string wrong = on_ranks(
          2, kPatientMs, [&](int rank, const std::shared_ptr<Communicator>& world) -> std::string {
            FusedMoE::Options o = options_of(engines_of(2, reduction), world);
            o.max_tokens = kMost;
            o.ranks.engine = RankEngine::kPeerWindows;
            const auto wide = make(o);
            o.ranks.pair_capacity = kRoom;
            const auto layer = make(o);
            if (!wide.ok() || !layer.ok()) return layer.status().to_string();
            RankCalls calls(700 + static_cast<std::uint64_t>(rank), tensors.spec.hidden_size,
                            kMost / kMostRows);
            std::vector<std::int32_t> of_slots;
            for (std::int64_t i = 0; i < kMost * k; ++i) {
              of_slots.push_back(static_cast<std::int32_t>(i % k));
            }
            const DeviceBytes ids(of_slots);
            const DeviceBytes weights(std::vector<float>(of_slots.size(), 0.75F));
            // All pairs are rank 0's; of the rows 100 are of rank 1.
            const auto args_of = [&](std::int64_t rows) {
              const std::int64_t mine = rank == 1 ? 100 : rows - 100;
              FusedMoE::Args args = calls.args_of(0, mine);
              args.topk_ids = {ids.as<const std::byte>(), DType::kI32, Shape{mine, k}, o.device};
              args.topk_weights = {weights.as<const std::byte>(), DType::kF32, Shape{mine, k},
                                   o.device};
              return args;
            };
            const auto run = [&](const FusedMoE& with, std::int64_t rows) -> Status {
              MOESAIC_RETURN_IF_ERROR(world->barrier("call"));
              MOESAIC_RETURN_IF_ERROR(with.enqueue({calls.stream()}, args_of(rows)));
              return calls.finish() ? with.health() : Status(StatusCode::kDevice, "not finished");
            };
            const auto replay = [&](std::size_t graph) -> Status {
              MOESAIC_RETURN_IF_ERROR(world->barrier("replay"));
              calls.replay(graph);
              return calls.finish() ? layer->health() : Status(StatusCode::kDevice, "not finished");
            };
            for (const std::int64_t rows : {std::int64_t{101}, kRoom / k - 1, kRoom / k}) {
              const std::int64_t mine = rank == 1 ? 100 : rows - 100;
              Status status = run(*wide, rows);
              if (!status.ok()) return status.to_string();
              calls.keep();
              calls.poison();
              status = run(*layer, rows);
              if (!status.ok()) return fmt::format("{} rows: {}", rows, status.to_string());
              if (!calls.same(0, mine)) return fmt::format("{} rows: other bits", rows);
            }
            // Captured, the call is refused when it is replayed.
            for (const std::int64_t more : {0, 1}) {
              const Status status = calls.capture(*layer, args_of(kRoom / k + more));
              if (!status.ok()) return "capture: " + status.to_string();
            }
            calls.poison();
            if (const Status status = replay(0); !status.ok())
              return "replay: " + status.to_string();
            if (!calls.same(0, rank == 1 ? 100 : kRoom / k - 100)) return "replay: other bits";
            const std::string had = fmt::format("pair_capacity: rank 0 got {} pairs", kRoom + k);
            const bool eager = reduction == RankReduction::kPerRank;
            expect_refusal(eager ? run(*layer, kRoom / k + 1) : replay(1),
                           StatusCode::kLimitExceeded,
                           {had.c_str(), "call 5", "need at most 1024"});
            if (!calls.all_nan(0, rank == 1 ? 100 : kRoom / k - 99)) return "no NaN";
            Status status = run(*wide, kRoom / k + 1);
            if (!status.ok()) return "with room for all: " + status.to_string();
            // As after every failure.
            expect_refusal(layer->enqueue({calls.stream()}, calls.args_of(0, 1)),
                           StatusCode::kLimitExceeded, {"pair_capacity"});
            status = world->barrier("done");
            return status.ok() ? "" : status.to_string();
          });
      EXPECT_EQ(wrong, "") << f.name << " " << rank_reduction_name(reduction);
    }
  }
}

// Refused arguments end the call of all ranks, long before their time is over.
TEST(CudaPeerRanks, ARankThatRefusesItsArgumentsEndsTheCallOfAll) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = test::make_tensors(55, test::deepseek_like());
  const test::MakeRankLayer make = test::maker_of(tensors);
  const std::string wrong = on_ranks(
      2, kPatientMs, [&](int rank, const std::shared_ptr<Communicator>& world) -> std::string {
        FusedMoE::Options o = options_of(engines_of(2, RankReduction::kPerRank), world);
        o.ranks.engine = RankEngine::kPeerWindows;
        const auto layer = make(o);
        if (!layer.ok()) return layer.status().to_string();
        RankCalls calls(600, tensors.spec.hidden_size, 2);
        Status status = world->barrier("ready");
        if (!status.ok()) return status.to_string();
        if (rank == 0) {
          status = calls.enqueue(*layer, 0, 3);
          if (!status.ok() || !calls.finish()) return status.to_string();
          expect_refusal(layer->health(), StatusCode::kDevice, {"rank 1 did not take part"});
          return "";
        }
        expect_refusal(calls.enqueue(*layer, 0, kMostRows + 1), StatusCode::kLimitExceeded,
                       {"tokens", "7"});
        if (!calls.finish()) return "the device has failed";
        expect_refusal(layer->health(), StatusCode::kDevice, {"rank 1 did not take part"});
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        return "";
      });
  EXPECT_EQ(wrong, "");
}

// What is only captured is no call: the rank whose arguments were refused captures and replays with others.
TEST(CudaPeerRanks, ACaptureThatIsRefusedEndsNoCall) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = test::make_tensors(55, test::deepseek_like());
  const test::MakeRankLayer make = test::maker_of(tensors);
  const std::string wrong = on_ranks(
      2, kPatientMs, [&](int rank, const std::shared_ptr<Communicator>& world) -> std::string {
        FusedMoE::Options o = options_of(engines_of(2, RankReduction::kPerRank), world);
        o.ranks.engine = RankEngine::kPeerWindows;
        const auto layer = make(o);
        if (!layer.ok()) return layer.status().to_string();
        RankCalls calls(650, tensors.spec.hidden_size, 2);
        Status status = world->barrier("ready");
        if (status.ok()) status = calls.enqueue(*layer, 0, 3);
        if (!status.ok() || !calls.finish()) return status.to_string();
        calls.keep();
        if (rank == 1) {
          expect_refusal(calls.capture(*layer, 0, kMostRows + 1), StatusCode::kLimitExceeded,
                         {"tokens", "7"});
        }
        status = calls.capture(*layer, 0, 3);
        if (!status.ok()) return status.to_string();
        calls.poison();
        if (!calls.finish()) return "poison";
        status = world->barrier("replay");
        if (!status.ok()) return status.to_string();
        calls.replay(0);
        if (!calls.finish()) return "the device has failed";
        if (!layer->health().ok()) return layer->health().to_string();
        if (!calls.same(0, 3)) return "other bits";
        status = world->barrier("done");
        return status.ok() ? "" : status.to_string();
      });
  EXPECT_EQ(wrong, "");
}

TEST(CudaPeerRanks, TheDefaultStreamOfASharedDeviceIsRefused) {
  REQUIRE_HOPPER();
  const LayerTensors tensors = test::make_tensors(56, test::deepseek_like());
  const test::MakeRankLayer make = test::maker_of(tensors);
  const std::string wrong =
      on_ranks(2, kPatientMs, [&](int, const std::shared_ptr<Communicator>& world) -> std::string {
        FusedMoE::Options o = options_of(engines_of(2, RankReduction::kPerRank), world);
        o.device = Device::cuda(test::device_of_rank(0));
        test::use_device_of_rank(0);
        o.ranks.engine = RankEngine::kPeerWindows;
        const auto layer = make(o);
        if (!layer.ok()) return layer.status().to_string();
        const DeviceBytes x(64 * 2), y(64 * 4);
        const Status status = layer->enqueue(
            {nullptr},
            ConstTensorView(x.as<const std::byte>(), DType::kBF16, Shape{1, 64}, o.device),
            TensorView(y.as<std::byte>(), DType::kF32, Shape{1, 64}, o.device));
        // The other rank may have said so first.
        EXPECT_FALSE(status.ok());
        const bool own = status.code() == StatusCode::kInvalidArgument;
        return own ? "" : status.code() == StatusCode::kDevice ? "" : status.to_string();
      });
  EXPECT_EQ(wrong, "");
}

}  // namespace
}  // namespace moesaic
