// Load balancing from outside: the caller's maps, load view and recording, the caller's ids and
// padding with it, and sums per rank.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "layer/eplb_case.h"
#include "moesaic/eplb.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::eplb_options;
using test::EplbFixture;
using test::expect_refusal;
using test::on_ranks;
using test::random_map;

constexpr std::int64_t kSlots = 16, kExperts = 12, kTopK = 5;

// A caller's maps of a placement, and the counters beside them.
struct CallersState {
  explicit CallersState(std::vector<std::int32_t> placed)
      : maps(make_expert_maps(placed, kExperts).value()), load(placed.size(), 0) {
    state.logical_to_physical = maps.logical_to_physical;
    state.replica_count = maps.replica_count;
    state.max_replicas = maps.max_replicas;
    state.load = load;
    state.record = true;
  }
  CallersState(const CallersState&) = delete;
  CallersState& operator=(const CallersState&) = delete;

  // By expert, whichever copies were used.
  std::vector<double> by_expert() const {
    std::vector<double> sum(kExperts, 0.0);
    for (std::size_t p = 0; p < load.size(); ++p) {
      sum[static_cast<std::size_t>(maps.physical_to_logical[p])] += load[p];
    }
    return sum;
  }
  ExpertMaps maps;
  std::vector<std::int32_t> load;
  EplbState state;
};

// Fills the slots of this rank as a caller would who has all experts at hand.
void place_experts(FusedMoE& all, FusedMoE& layer, const std::vector<std::int32_t>& placed) {
  const auto from = all.get_expert_weights().value(), to = layer.get_expert_weights().value();
  ASSERT_EQ(from.size(), to.size());
  const std::int64_t local = layer.local_num_experts();
  const std::int64_t first = layer.parallel().ep_rank * local;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::int64_t bytes = from[i].rows.dim(1);
    ASSERT_EQ(to[i].rows.dim(1), bytes);
    ASSERT_EQ(to[i].rows.dim(0), local);
    for (std::int64_t s = 0; s < local; ++s) {
      std::memcpy(to[i].rows.data + s * bytes,
                  from[i].rows.data + placed[static_cast<std::size_t>(first + s)] * bytes,
                  static_cast<std::size_t>(bytes));
    }
  }
}

FusedMoE layer_with_all(const EplbFixture& f) {
  FusedMoE::Options one;
  one.num_threads = 1;
  return test::make_layer(f.tensors, one);
}

FusedMoE::Options on_one_rank() {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.max_tokens = 5;
  o.ranks.enable_eplb = true;
  o.ranks.num_redundant_experts = kSlots - kExperts;
  return o;
}

// How often the one-rank run of `f` chose each expert in the rows of `engine` with mask[row] == 0.
std::vector<double> chosen(const EplbFixture& f, int engine,
                           const std::vector<std::uint8_t>& mask = {}) {
  std::vector<double> count(kExperts, 0.0);
  for (std::int64_t t = 0; t < test::kEplbTokens; ++t) {
    if (!mask.empty() && mask[static_cast<std::size_t>(t)] != 0) continue;
    for (std::int64_t j = 0; j < kTopK; ++j) {
      const std::int64_t at = (engine * test::kEplbTokens + t) * kTopK + j;
      ++count[static_cast<std::size_t>(f.run.topk_ids.as<std::int32_t>()[at])];
    }
  }
  return count;
}

TEST(EplbState, ACallerMovesExpertsOnOneRankAndNoBitChanges) {
  const EplbFixture f(test::eplb_spec());
  FusedMoE all = layer_with_all(f);
  FusedMoE layer = test::make_layer(f.tensors, on_one_rank());
  EXPECT_EQ(layer.global_num_experts(), kSlots);
  EXPECT_EQ(layer.local_num_experts(), kSlots);
  EXPECT_TRUE(layer.expert_map().empty());
  EXPECT_EQ(f.forward(layer, 0), "");
  for (std::uint64_t round = 0; round < 4; ++round) {
    CallersState caller(random_map(round, kExperts, kSlots));
    place_experts(all, layer, caller.maps.physical_to_logical);
    const Status taken = layer.set_eplb_state(caller.state, caller.maps.physical_to_logical);
    ASSERT_TRUE(taken.ok()) << taken.to_string();
    EXPECT_EQ(layer.physical_to_logical(), caller.maps.physical_to_logical);
    EXPECT_EQ(f.forward(layer, 1), "");
    EXPECT_EQ(caller.by_expert(), chosen(f, 1));
    // Recording off: the same bits and no count; on again: the old counts and new ones.
    ASSERT_TRUE(layer.set_eplb_recording(false).ok());
    EXPECT_EQ(f.forward(layer, 2), "");
    EXPECT_EQ(caller.by_expert(), chosen(f, 1));
    ASSERT_TRUE(layer.set_eplb_recording(true).ok());
    EXPECT_EQ(f.forward(layer, 1), "");
    std::vector<double> twice = chosen(f, 1);
    for (double& v : twice) v *= 2;
    EXPECT_EQ(caller.by_expert(), twice);
    // The view goes when another state comes; the maps of the slots are still right without it.
    caller.state.load = {};
    ASSERT_TRUE(layer.set_eplb_state(caller.state).ok());
    EXPECT_EQ(f.forward(layer, 3), "");
    EXPECT_EQ(caller.by_expert(), twice);
  }
}

// A row's place in the call, not in the chunk of max_tokens that computes it.
TEST(EplbState, CopiesGoByTheRowsOfTheWholeCall) {
  const EplbFixture f(test::eplb_spec());
  // Four copies of expert 0: kTopK slots of a row are no multiple of them.
  std::vector<std::int32_t> placed(kSlots, 0);
  std::iota(placed.begin(), placed.begin() + kExperts, 0);
  placed.back() = 1;
  for (const std::int64_t max_tokens : {1, 3, 9}) {
    FusedMoE all = layer_with_all(f);
    FusedMoE::Options options = on_one_rank();
    options.max_tokens = max_tokens;
    FusedMoE layer = test::make_layer(f.tensors, options);
    CallersState caller(placed);
    place_experts(all, layer, placed);
    ASSERT_TRUE(layer.set_eplb_state(caller.state, placed).ok());
    EXPECT_EQ(f.forward(layer, 0), "");
    std::vector<std::int32_t> want(kSlots, 0);
    for (std::int64_t p = 0; p < test::kEplbTokens * kTopK; ++p) {
      const std::int64_t e = f.run.topk_ids.as<std::int32_t>()[p];
      const auto copy = p % caller.maps.replica_count[static_cast<std::size_t>(e)];
      const auto at = static_cast<std::size_t>(e * caller.maps.max_replicas + copy);
      ++want[static_cast<std::size_t>(caller.maps.logical_to_physical[at])];
    }
    EXPECT_EQ(caller.load, want) << "max_tokens " << max_tokens;
  }
}

TEST(EplbState, CountersStopAtTheirLargestValue) {
  const EplbFixture f(test::eplb_spec());
  FusedMoE layer = test::make_layer(f.tensors, on_one_rank());
  CallersState caller(layer.physical_to_logical());
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  std::fill(caller.load.begin(), caller.load.end(), kMost - 1);
  ASSERT_TRUE(layer.set_eplb_state(caller.state).ok());
  for (int call = 0; call < 3; ++call) EXPECT_EQ(f.forward(layer, call), "");
  for (const std::int32_t v : caller.load) EXPECT_GE(v, kMost - 1);
  // From any number on.
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  std::fill(caller.load.begin(), caller.load.end(), kLeast);
  EXPECT_EQ(f.forward(layer, 3), "");
  std::int64_t counted = 0;
  for (const std::int32_t v : caller.load) counted += std::int64_t{v} - kLeast;
  EXPECT_EQ(counted, test::kEplbTokens * kTopK);
}

TEST(EplbState, PaddingIsNoLoad) {
  const EplbFixture f(test::eplb_spec());
  FusedMoE layer = test::make_layer(f.tensors, on_one_rank());
  CallersState caller(layer.physical_to_logical());
  ASSERT_TRUE(layer.set_eplb_state(caller.state).ok());
  Tensor mask = Tensor::zeros(DType::kU8, {test::kEplbTokens}).value();
  std::vector<std::uint8_t> padded(test::kEplbTokens, 0);
  for (const std::size_t t : std::vector<std::size_t>{1, 4, 8})
    padded[t] = mask.as<std::uint8_t>()[t] = 7;
  Tensor out = Tensor::uninitialized(DType::kF32, f.rows_of(0).shape).value();
  FusedMoE::Args args;
  args.hidden_states = f.rows_of(0);
  args.output = out.view();
  args.padding_mask = mask.view();
  ASSERT_TRUE(layer.forward(args).ok());
  EXPECT_EQ(caller.by_expert(), chosen(f, 0, padded));
  EXPECT_EQ(layer.measured_load().value(), chosen(f, 0, padded));
  // The same with ids of the caller's.
  args.topk_ids =
      ConstTensorView(f.run.topk_ids.data(), DType::kI32, Shape{test::kEplbTokens, kTopK});
  args.topk_weights =
      ConstTensorView(f.run.topk_weights.data(), DType::kF32, Shape{test::kEplbTokens, kTopK});
  ASSERT_TRUE(layer.forward(args).ok());
  std::vector<double> twice = chosen(f, 0, padded);
  for (double& v : twice) v *= 2;
  EXPECT_EQ(caller.by_expert(), twice);
  EXPECT_EQ(layer.measured_load().value(), twice);
  // A call that fails counts nothing.
  args.hidden_states = f.rows_of(1);
  args.output = TensorView();
  EXPECT_FALSE(layer.forward(args).ok());
  EXPECT_EQ(caller.by_expert(), twice);
}

TEST(EplbState, IdentityExpertsAreNoLoad) {
  MoeLayerSpec spec = test::with_identity_experts();
  const test::LayerTensors tensors = test::make_tensors(81, spec);
  const Tensor x = test::random_hidden(82, 40, spec.hidden_size);
  FusedMoE::Options o = on_one_rank();
  o.ranks.num_redundant_experts = 3;
  const FusedMoE layer = test::make_layer(tensors, o);
  const test::LayerRun want = test::run_layer(test::make_layer(tensors), x);
  const test::LayerRun run = test::run_layer(layer, x);
  std::string why;
  EXPECT_TRUE(test::same_bits(run.output.view(), want.output.view(), &why)) << why;
  double expected = 0, measured = 0;
  for (std::int64_t i = 0; i < 40 * spec.routing.top_k; ++i) {
    expected += want.topk_weights.as<float>()[i] != 0 ? 1 : 0;
  }
  const std::vector<double> load = layer.measured_load().value();
  measured = std::accumulate(load.begin(), load.end(), 0.0);
  EXPECT_EQ(measured, expected);
  EXPECT_LT(expected, 40.0 * static_cast<double>(spec.routing.top_k));
}

// Four ranks; every way of the rows, the layer's own routing and the caller's logits and ids.
TEST(EplbState, ACallerMovesExpertsOverRanksAndNoBitChanges) {
  const EplbFixture f(test::eplb_spec());
  for (const auto& [transport, dp] :
       {std::pair{RankTransport::kAllToAll, 4}, std::pair{RankTransport::kBatched, 4},
        std::pair{RankTransport::kGather, 2}, std::pair{RankTransport::kNone, 1}}) {
    const auto wrong = on_ranks([&, t = transport, engines = dp](
                                    int rank, std::shared_ptr<Communicator> c) -> std::string {
      FusedMoE all = layer_with_all(f);
      auto layer = FusedMoE::create(f.tensors.weights(), eplb_options(rank, engines, t, c));
      if (!layer.ok()) return layer.status().to_string();
      const int engine = rank * engines / test::kEplbRanks;
      const std::int64_t first = engine * test::kEplbTokens;
      FusedMoE::Args given;
      given.topk_ids = ConstTensorView(f.run.topk_ids.data() + first * kTopK * 4, DType::kI32,
                                       Shape{test::kEplbTokens, kTopK});
      given.topk_weights = ConstTensorView(f.run.topk_weights.data() + first * kTopK * 4,
                                           DType::kF32, Shape{test::kEplbTokens, kTopK});
      FusedMoE::Args logits;
      logits.router_logits = ConstTensorView(f.run.logits.data() + first * kExperts * 4,
                                             DType::kF32, Shape{test::kEplbTokens, kExperts});
      for (std::uint64_t round = 0; round < 3; ++round) {
        CallersState caller(random_map(20 + round, kExperts, kSlots));
        place_experts(all, *layer, caller.maps.physical_to_logical);
        const Status taken = layer->set_eplb_state(caller.state, caller.maps.physical_to_logical);
        if (!taken.ok()) return taken.to_string();
        for (const FusedMoE::Args& more : {FusedMoE::Args(), given, logits}) {
          const std::string wrong_rows = f.forward(*layer, engine, 0, more);
          if (!wrong_rows.empty()) return wrong_rows;
        }
        std::vector<double> thrice = chosen(f, engine);
        for (double& v : thrice) v *= 3;
        if (caller.by_expert() != thrice) return "other loads";
      }
      return "";
    });
    for (const std::string& w : wrong) {
      EXPECT_EQ(w, "") << rank_transport_name(transport) << " dp " << dp;
    }
  }
}

// Without a communicator: ranks' parts, which the caller adds up.
TEST(EplbState, PartsOfRanksWithoutACommunicatorAddUp) {
  const EplbFixture f(test::eplb_spec());
  FusedMoE all = layer_with_all(f);
  const std::vector<std::int32_t> placed = random_map(31, kExperts, kSlots);
  std::vector<double> sum;
  for (int rank = 0; rank < test::kEplbRanks; ++rank) {
    FusedMoE layer =
        FusedMoE::create(f.tensors.weights(), eplb_options(rank, 4, RankTransport::kAuto, nullptr))
            .value();
    CallersState caller(placed);
    place_experts(all, layer, placed);
    ASSERT_TRUE(layer.set_eplb_state(caller.state, placed).ok());
    const std::vector<double> part = test::to_doubles(test::run_layer(layer, f.x).output.view());
    sum.resize(part.size());
    for (std::size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
    EXPECT_FALSE(layer.output_is_reduced());
  }
  const auto result = test::compare(sum, test::to_doubles(f.run.output.view()));
  EXPECT_LE(result.rel_l2, 1e-6) << result.describe;
}

TEST(EplbState, BadMapsAreNamedAndNothingChanges) {
  const EplbFixture f(test::eplb_spec());
  FusedMoE layer = test::make_layer(f.tensors, on_one_rank());
  const std::vector<std::int32_t> placed = layer.physical_to_logical();  // 0 .. 11, 0, 1, 2, 3
  CallersState good(placed);
  ASSERT_TRUE(layer.set_eplb_state(good.state).ok());
  EXPECT_EQ(f.forward(layer, 0), "");
  const std::vector<std::int32_t> counted = good.load;
  const auto refuse = [&](const EplbState& state, std::span<const std::int32_t> slots,
                          std::initializer_list<const char*> words) {
    expect_refusal(layer.set_eplb_state(state, slots), StatusCode::kInvalidArgument, words);
    EXPECT_EQ(layer.physical_to_logical(), placed);
    EXPECT_EQ(f.forward(layer, 0), "");
    for (std::size_t p = 0; p < counted.size(); ++p) {
      EXPECT_GE(good.load[p], counted[p]) << "the counters are still in use";
    }
  };
  const auto with_entry = [&](std::int64_t at, std::int32_t slot,
                              std::initializer_list<const char*> words) {
    CallersState bad(placed);
    bad.maps.logical_to_physical[static_cast<std::size_t>(at)] = slot;
    refuse(bad.state, {}, words);
  };
  // [3, 1] is the copy of expert 3 in slot 15.
  with_entry(3 * 2 + 1, 16, {"eplb.logical_to_physical[3, 1]: got 16", "need 0 to 15"});
  with_entry(3 * 2 + 1, -1, {"eplb.logical_to_physical[3, 1]: got -1"});
  with_entry(3 * 2 + 1, 3, {"eplb.logical_to_physical[3, 1]: got slot 3 a second time"});
  with_entry(3 * 2 + 1, 14,
             {"eplb.logical_to_physical[3, 1]: got slot 14, which holds expert 2",
              "need one that holds expert 3 (the first is 3)"});
  {
    CallersState bad(placed);
    bad.maps.replica_count[5] = 0;
    refuse(bad.state, {}, {"eplb.replica_count[5]: got 0", "1 to max_replicas 2"});
    bad.maps.replica_count[5] = 2;  // of which the second is -1
    refuse(bad.state, {}, {"eplb.logical_to_physical[5, 1]: got -1"});
    bad.maps.replica_count[5] = 3;
    refuse(bad.state, {}, {"eplb.replica_count[5]: got 3"});
  }
  {
    CallersState bad(placed);
    bad.state.replica_count = bad.state.replica_count.first(11);
    refuse(bad.state, {}, {"eplb.replica_count: got 11 entries, need 12"});
    bad.state = good.state;
    bad.state.max_replicas = 3;
    refuse(bad.state, {}, {"eplb.logical_to_physical: got 24 entries, need 36"});
    bad.state = good.state;
    bad.state.load = bad.state.load.first(15);
    refuse(bad.state, {}, {"eplb.load: got 15 counters, need 16"});
    std::vector<std::int32_t> slots = placed;
    slots[9] = 12;
    refuse(good.state, slots, {"physical_to_logical[9]: got 12, need 0 to 11"});
    slots.pop_back();
    refuse(good.state, slots, {"physical_to_logical: got 15 slots, need 16"});
  }
  // Maps of a placement that is not there: before experts moved, or after they have.
  {
    CallersState stale(random_map(3, kExperts, kSlots));
    refuse(stale.state, {}, {"eplb.logical_to_physical[", "which holds expert"});
    refuse(good.state, stale.maps.physical_to_logical, {"which holds expert"});
  }
  ASSERT_TRUE(layer.begin_rearrange(random_map(4, kExperts, kSlots)).ok());
  refuse(good.state, {}, {"eplb: a rearrangement is in flight"});
  while (!layer.continue_rearrange().value()) {
  }
  expect_refusal(layer.set_eplb_state(good.state), StatusCode::kInvalidArgument,
                 {"which holds expert"});
  // The counters outlive the maps.
  const std::int64_t before = std::accumulate(good.load.begin(), good.load.end(), std::int64_t{0});
  EXPECT_EQ(f.forward(layer, 0), "");
  EXPECT_EQ(std::accumulate(good.load.begin(), good.load.end(), std::int64_t{0}),
            before + test::kEplbTokens * kTopK);
  // And those of a world that is gone.
  const auto all = make_stacked_source(f.tensors.experts.view());
  ASSERT_TRUE(layer.update_expert_map({}, *all).ok());
  expect_refusal(layer.set_eplb_state(good.state), StatusCode::kInvalidArgument,
                 {"eplb.load: got 16 counters, need 12"});
  EXPECT_EQ(f.forward(layer, 0), "");
}

TEST(EplbState, RanksWithOtherMapsAreRefused) {
  const EplbFixture f(test::eplb_spec());
  const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
    auto layer =
        FusedMoE::create(f.tensors.weights(), eplb_options(rank, 4, RankTransport::kAuto, c));
    if (!layer.ok()) return layer.status().to_string();
    const auto placed = layer->physical_to_logical();
    CallersState caller(placed);
    if (rank == 2) caller.maps.replica_count[1] = 1;  // by itself a good map
    expect_refusal(layer->set_eplb_state(caller.state), StatusCode::kInvalidArgument,
                   {"eplb: rank", "has other maps than rank"});
    caller.maps.replica_count[1] = rank == 3 ? 0 : 2;
    expect_refusal(layer->set_eplb_state(caller.state), StatusCode::kInvalidArgument,
                   {rank == 3 ? "eplb.replica_count[1]: got 0" : "eplb: rank 3 refused"});
    const std::string still = f.forward(*layer, rank);
    if (!still.empty()) return still;
    const auto sum = caller.by_expert();
    return std::accumulate(sum.begin(), sum.end(), 0.0) == 0 ? "" : "counted into a refused view";
  });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

// Some copies only: rows go to those that the maps name.
TEST(EplbState, RowsGoToTheCopiesThatAreNamed) {
  const EplbFixture f(test::eplb_spec());
  FusedMoE layer = test::make_layer(f.tensors, on_one_rank());
  CallersState caller(layer.physical_to_logical());
  std::fill(caller.maps.replica_count.begin(), caller.maps.replica_count.end(), 1);
  for (std::size_t e = 0; e < 4; ++e) {
    caller.maps.logical_to_physical[e * 2] = static_cast<std::int32_t>(12 + e);
  }
  ASSERT_TRUE(layer.set_eplb_state(caller.state).ok());
  EXPECT_EQ(f.forward(layer, 0), "");
  for (std::size_t p = 0; p < 4; ++p) EXPECT_EQ(caller.load[p], 0);
  EXPECT_EQ(caller.by_expert(), chosen(f, 0));
}

TEST(EplbState, SumsPerRankAreAnOption) {
  const EplbFixture f(test::eplb_spec());
  for (const auto& [transport, dp] :
       {std::pair{RankTransport::kAllToAll, 4}, std::pair{RankTransport::kGather, 2},
        std::pair{RankTransport::kNone, 1}}) {
    std::vector<std::int64_t> bytes[2];
    for (const bool per_rank : {false, true}) {
      bytes[per_rank ? 1 : 0].resize(test::kEplbRanks);
      const auto wrong = on_ranks([&, t = transport, engines = dp](
                                      int rank, std::shared_ptr<Communicator> c) -> std::string {
        FusedMoE::Options o = eplb_options(rank, engines, t, c);
        if (per_rank) o.ranks.reduction = RankReduction::kPerRank;
        auto layer = FusedMoE::create(f.tensors.weights(), o);
        if (!layer.ok()) return layer.status().to_string();
        const bool said = layer->determinism().find("per_rank sums") != std::string::npos;
        if (said != per_rank) return "determinism: " + layer->determinism();
        const int engine = rank * engines / test::kEplbRanks;
        const double bound = per_rank ? 1e-6 : 0;
        const std::int64_t before = layer->bytes_sent();
        std::string now = f.forward(*layer, engine, bound);
        bytes[per_rank ? 1 : 0][static_cast<std::size_t>(rank)] = layer->bytes_sent() - before;
        const Status begun = layer->begin_rearrange(random_map(41, kExperts, kSlots));
        if (!begun.ok()) return begun.to_string();
        for (bool done = false; !done && now.empty();) {
          done = layer->continue_rearrange(2).value();
          now = f.forward(*layer, engine, bound);
        }
        return now;
      });
      for (const std::string& w : wrong) EXPECT_EQ(w, "") << rank_transport_name(transport);
    }
    for (std::size_t r = 0; r < bytes[0].size(); ++r) {
      EXPECT_LT(bytes[1][r], bytes[0][r]) << rank_transport_name(transport) << " rank " << r;
    }
  }
}

TEST(EplbState, ExpertsAreInMemoryOnce) {
  const EplbFixture f(test::eplb_spec());
  const FusedMoE plain = layer_with_all(f);
  FusedMoE::Options o = on_one_rank();
  o.ranks.num_redundant_experts = 0;
  const FusedMoE balanced = test::make_layer(f.tensors, o);
  EXPECT_EQ(balanced.weight_bytes(), plain.weight_bytes());
}

}  // namespace
}  // namespace moesaic
