// Experts move between ranks (threads that share one GPU) while a layer serves there. Skipped,
// visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "layer/eplb_case.h"
#include "layer/layer_specs.h"
#include "moesaic/eplb.h"
#include "router/eplb_map.h"
#include "support/cuda_device.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::EplbFixture;
using test::expect_refusal;
using test::on_ranks;
using test::random_map;

constexpr int kRanks = test::kEplbRanks;
constexpr std::int64_t kTokens = test::kEplbTokens;
constexpr double kBound = 1e-6;  // of one rank, whose shared expert may be added in another order

FusedMoE::Options options_of(int rank, int dp, RankTransport transport,
                             const std::shared_ptr<Communicator>& communicator) {
  FusedMoE::Options o = test::eplb_options(rank, dp, transport, communicator);
  o.device = Device::cuda(0);
  return o;
}

TEST(CudaBalance, TheOutputDoesNotChangeByABitInMidStream) {
  REQUIRE_HOPPER();
  const EplbFixture f(test::eplb_spec(), test::on_gpu());
  for (const auto& [transport, dp] :
       {std::pair{RankTransport::kAllToAll, 4}, std::pair{RankTransport::kNone, 1},
        std::pair{RankTransport::kAllToAll, 2}}) {
    const auto wrong = on_ranks(
        [&, t = transport, engines = dp](int rank, std::shared_ptr<Communicator> c) -> std::string {
          auto layer = FusedMoE::create(f.tensors.weights(), options_of(rank, engines, t, c));
          if (!layer.ok()) return layer.status().to_string();
          return test::serve_while_experts_move(*layer, f, rank * engines / kRanks, kBound);
        });
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(wrong[static_cast<std::size_t>(r)], "")
          << "rank " << r << " " << rank_transport_name(transport) << " dp " << dp;
    }
  }
}

// Every scheme moves: the arrays that the backends hand out are all that an expert is.
TEST(CudaBalance, ExpertsOfEverySchemeMoveWhole) {
  REQUIRE_HOPPER();
  MoeLayerSpec spec = test::eplb_spec();
  spec.hidden_size = 256;
  spec.intermediate_size = spec.shared.intermediate_size = 128;
  const test::LayerTensors plain = test::make_tensors(51, spec);
  int moved_schemes = 0;
  for (const Scheme& scheme : quant_schemes()) {
    SCOPED_TRACE(std::string(scheme.name));
    FusedMoE::Options one = test::on_gpu();
    one.quant = scheme.name;
    // Plain weights do not become every scheme.
    if (FusedMoE::create(plain.weights(), one).status().code() == StatusCode::kUnsupported) {
      continue;
    }
    ++moved_schemes;
    const EplbFixture f(spec, one);
    const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
      FusedMoE::Options o = options_of(rank, kRanks, RankTransport::kAllToAll, c);
      o.quant = scheme.name;
      auto layer = FusedMoE::create(f.tensors.weights(), o);
      if (!layer.ok()) return layer.status().to_string();
      Tensor want, got;
      std::string why = f.forward(*layer, rank, kBound, {}, &want);
      if (!why.empty()) return why;
      const Status begun = layer->begin_rearrange(random_map(3, 12, 16));
      if (!begun.ok()) return begun.to_string();
      for (bool done = false; !done;) {
        const auto moved = layer->continue_rearrange(16);
        if (!moved.ok()) return moved.status().to_string();
        done = *moved;
      }
      why = f.forward(*layer, rank, kBound, {}, &got);
      if (!why.empty()) return why;
      return test::same_bits(got.view(), want.view(), &why) ? "" : "other bits: " + why;
    });
    for (const std::string& w : wrong) EXPECT_EQ(w, "");
  }
  EXPECT_GT(moved_schemes, 12);
}

TEST(CudaBalance, MeasuredLoadCountsEveryRowOnceAndForgets) {
  REQUIRE_HOPPER();
  const EplbFixture f(test::eplb_spec(), test::on_gpu());
  for (const int dp : {4, 2}) {
    const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
      auto layer =
          FusedMoE::create(f.tensors.weights(), options_of(rank, dp, RankTransport::kAllToAll, c));
      if (!layer.ok()) return layer.status().to_string();
      return test::measure_five_calls(*layer, f, rank * dp / kRanks, dp, kBound);
    });
    for (const std::string& w : wrong) EXPECT_EQ(w, "") << "dp " << dp;
  }
}

// Calls of streams are steps too; counters of the caller's are brought up to date with the loads,
// by slot, and none are counted while recording is off.
TEST(CudaBalance, CallsOfStreamsFillTheCallersCounters) {
  REQUIRE_HOPPER();
  const EplbFixture f(test::eplb_spec(), test::on_gpu());
  const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
    auto layer = FusedMoE::create(f.tensors.weights(),
                                  options_of(rank, kRanks, RankTransport::kAllToAll, c));
    if (!layer.ok()) return layer.status().to_string();
    const std::vector<std::int32_t> slots = layer->physical_to_logical();
    const ExpertMaps maps = make_expert_maps(slots, 12).value();
    std::vector<std::int32_t> load(slots.size(), 0);
    EplbState state;
    state.logical_to_physical = maps.logical_to_physical;
    state.replica_count = maps.replica_count;
    state.max_replicas = maps.max_replicas;
    state.load = load;
    state.record = true;
    Status status = layer->set_eplb_state(state);
    if (!status.ok()) return status.to_string();
    const ConstTensorView x = f.rows_of(rank);
    const std::int64_t bytes = x.dim(0) * x.dim(1);
    const test::DeviceBytes in(x.data, bytes * 2), out(bytes * 4);
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (int call = 0; call < 4 && status.ok(); ++call) {
      status = layer->set_eplb_recording(call != 2);
      if (!status.ok()) break;
      status = layer->enqueue(
          {stream},
          ConstTensorView(in.as<const std::byte>(), DType::kBF16, x.shape, Device::cuda(0)),
          TensorView(out.as<std::byte>(), DType::kF32, x.shape, Device::cuda(0)));
    }
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    if (!status.ok()) return status.to_string();
    const auto measured = layer->measured_load();
    if (!measured.ok()) return measured.status().to_string();
    if (*measured != test::choices(f, 0, kRanks, 3)) return "other loads of all ranks";
    // A step takes five rows, the last one the rest; positions count from its first row.
    std::vector<std::int32_t> want(slots.size(), 0);
    const std::int64_t k = f.tensors.spec.routing.top_k, step = 5;
    for (std::int64_t first = 0; first < kTokens; first += step) {
      const std::int32_t* const from =
          f.run.topk_ids.as<std::int32_t>() + (rank * kTokens + first) * k;
      const std::int64_t rows = std::min(step, kTokens - first);
      std::vector<std::int32_t> ids(from, from + rows * k);
      EplbState counted = state;
      counted.load = want;
      router::map_logical_to_physical(counted, 12, rows, k, nullptr, ids.data());
    }
    for (std::int32_t& v : want) v *= 3;
    if (load != want) return "other counters";
    return "";
  });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

TEST(CudaBalance, WithoutACommunicatorItIsRefused) {
  REQUIRE_HOPPER();
  const EplbFixture f(test::eplb_spec(), test::on_gpu());
  FusedMoE::Options o = test::on_gpu();
  o.ranks.enable_eplb = true;
  expect_refusal(FusedMoE::create(f.tensors.weights(), o).status(), StatusCode::kUnsupported,
                 {"enable_eplb: got true on a GPU without a communicator"});
}

}  // namespace
}  // namespace moesaic
