// Experts move between ranks (threads) while a layer serves.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>

#include "layer/rank_case.h"
#include "moesaic/eplb.h"
#include "support/hang_guard.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

constexpr int kRanks = 4;
constexpr std::int64_t kTokens = 9;  // per engine

MoeLayerSpec grouped() {
  MoeLayerSpec spec = test::small_spec();
  spec.num_experts = spec.routing.num_experts = 12;
  spec.routing.top_k = 5;  // more than two: the order of the sum shows in the bits
  spec.routing.method = RoutingMethod::kGroupedTopK;
  spec.routing.scoring_func = ScoringFunc::kSigmoid;
  spec.routing.num_expert_group = 4;
  spec.routing.topk_group = 3;
  spec.shared.intermediate_size = 16;
  return spec;
}

FusedMoE::Options options_of(int rank, int dp, RankTransport transport,
                             const std::shared_ptr<Communicator>& communicator) {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.max_tokens = 5;
  o.ranks.communicator = communicator;
  o.ranks.transport = transport;
  o.parallel.ep_size = kRanks;
  o.parallel.ep_rank = rank;
  o.parallel.dp_size = dp;
  o.parallel.dp_rank = rank * dp / kRanks;
  o.ranks.enable_eplb = true;
  o.ranks.num_redundant_experts = 4;
  o.ranks.eplb_window = 3;
  return o;
}

// Every expert somewhere, the rest at random.
std::vector<std::int32_t> random_map(std::uint64_t seed, std::int64_t experts, std::int64_t slots) {
  test::Rng rng(seed);
  std::vector<std::int32_t> map;
  for (std::int64_t s = 0; s < slots; ++s) {
    map.push_back(static_cast<std::int32_t>(s < experts ? s : rng.integer(0, experts - 1)));
  }
  for (std::size_t i = map.size(); i > 1; --i) {
    std::swap(map[i - 1], map[static_cast<std::size_t>(rng.integer(0, std::ssize(map) - 1)) % i]);
  }
  return map;
}

// body(rank, communicator) on kRanks threads; what each returns.
std::vector<std::string> on_ranks(
    const std::function<std::string(int, std::shared_ptr<Communicator>)>& body) {
  auto ranks = make_in_process_communicators(kRanks, {.timeout_ms = test::kHangGuardMs}).value();
  std::vector<std::string> result(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      const auto i = static_cast<std::size_t>(r);
      result[i] = body(r, std::shared_ptr<Communicator>(std::move(ranks[i])));
    });
  }
  for (std::thread& t : threads) t.join();
  return result;
}

struct Fixture {
  explicit Fixture(const MoeLayerSpec& spec) : tensors(test::make_tensors(51, spec)) {
    x = test::random_hidden(52, kTokens * kRanks, spec.hidden_size);
    FusedMoE::Options one;
    one.num_threads = 1;
    run = test::run_layer(test::make_layer(tensors, one), x);
  }
  // Empty, or how the rows of `engine` differ from those of a layer on one rank.
  std::string forward(const FusedMoE& layer, int engine) const {
    const std::int64_t hidden = tensors.spec.hidden_size;
    const std::int64_t first = engine * kTokens;
    const ConstTensorView rows(x.data() + first * hidden * 2, x.dtype(), Shape{kTokens, hidden});
    Tensor out = Tensor::uninitialized(DType::kF32, rows.shape).value();
    Tensor ids = Tensor::zeros(DType::kI32, {kTokens, tensors.spec.routing.top_k}).value();
    test::poison(out.view());
    FusedMoE::Trace trace;
    trace.topk_ids = ids.view();
    const Status status = layer.forward(rows, out.view(), trace);
    if (!status.ok()) return status.to_string();
    const ConstTensorView want(run.output.data() + first * hidden * 4, DType::kF32, rows.shape);
    std::string why;
    if (!test::same_bits(out.view(), want, &why)) return "output: " + why;
    const ConstTensorView chosen(run.topk_ids.data() + first * tensors.spec.routing.top_k * 4,
                                 DType::kI32, ids.shape());
    return test::same_bits(ids.view(), chosen, &why) ? "" : "logical ids: " + why;
  }
  test::LayerTensors tensors;
  Tensor x;
  test::LayerRun run;
};

TEST(Rearrange, TheOutputDoesNotChangeByABitInMidStream) {
  const Fixture f(grouped());
  for (const auto& [transport, dp] :
       {std::pair{RankTransport::kAllToAll, 4}, std::pair{RankTransport::kBatched, 4},
        std::pair{RankTransport::kGather, 2}, std::pair{RankTransport::kNone, 1},
        std::pair{RankTransport::kAllToAll, 2}}) {
    const auto wrong = on_ranks(
        [&, t = transport, engines = dp](int rank, std::shared_ptr<Communicator> c) -> std::string {
          auto layer = FusedMoE::create(f.tensors.weights(), options_of(rank, engines, t, c));
          if (!layer.ok()) return layer.status().to_string();
          const int engine = rank * engines / kRanks;
          std::string first = f.forward(*layer, engine);
          for (std::uint64_t round = 0; round < 6; ++round) {
            const auto before = layer->physical_to_logical();
            const auto wanted = random_map(round, 12, 16);
            const Status begun =
                round % 2 == 0 ? layer->begin_rearrange(wanted) : layer->begin_rebalance();
            if (!begun.ok()) return begun.to_string();
            for (bool done = false; !done;) {
              if (first.empty() && layer->physical_to_logical() != before) first = "early switch";
              const auto moved = layer->continue_rearrange(2);
              if (!moved.ok()) return moved.status().to_string();
              done = *moved;
              const std::string now = f.forward(*layer, engine);
              if (first.empty() && !now.empty())
                first = "round " + std::to_string(round) + " " + now;
            }
            if (first.empty() && round % 2 == 0 && layer->physical_to_logical() != wanted) {
              first = "not the map that was wanted";
            }
          }
          return first;
        });
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(wrong[static_cast<std::size_t>(r)], "")
          << "rank " << r << " " << rank_transport_name(transport) << " dp " << dp;
    }
  }
}

TEST(Rearrange, MeasuredLoadCountsEveryRowOnceAndForgets) {
  const Fixture f(grouped());
  for (const int dp : {4, 2}) {
    std::vector<double> want(12, 0.0);
    for (std::int64_t i = 0; i < dp * kTokens * 5; ++i) {
      want[static_cast<std::size_t>(f.run.topk_ids.as<std::int32_t>()[i])] += 3;  // the window
    }
    const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
      auto layer =
          FusedMoE::create(f.tensors.weights(), options_of(rank, dp, RankTransport::kAllToAll, c));
      if (!layer.ok()) return layer.status().to_string();
      for (int step = 0; step < 5; ++step) {
        const std::string bad = f.forward(*layer, rank * dp / kRanks);
        if (!bad.empty()) return bad;
      }
      const auto load = layer->measured_load();
      if (!load.ok()) return load.status().to_string();
      return *load == want ? "" : "other loads";
    });
    for (const std::string& w : wrong) EXPECT_EQ(w, "") << "dp " << dp;
  }
}

TEST(Rearrange, AnUnchangedMapMovesNothing) {
  const Fixture f(grouped());
  const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
    auto layer =
        FusedMoE::create(f.tensors.weights(), options_of(rank, 4, RankTransport::kAllToAll, c));
    if (!layer.ok()) return layer.status().to_string();
    const std::int64_t before = layer->bytes_sent();
    const Status begun = layer->begin_rearrange(layer->physical_to_logical());
    if (!begun.ok()) return begun.to_string();
    int calls = 0;
    for (bool done = false; !done; ++calls) done = layer->continue_rearrange().value();
    // Agreement: 8 bytes to each of three peers, once and per call.
    const std::int64_t sent = layer->bytes_sent() - before;
    if (sent != 24 * (1 + calls)) return "sent " + std::to_string(sent);
    return f.forward(*layer, rank);
  });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

TEST(Rearrange, RefusesByName) {
  const Fixture f(grouped());
  const auto said = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
    auto layer =
        FusedMoE::create(f.tensors.weights(), options_of(rank, 4, RankTransport::kAllToAll, c));
    if (!layer.ok()) return layer.status().to_string();
    expect_refusal(layer->continue_rearrange().status(), StatusCode::kInvalidArgument,
                   {"rearrange: none is in flight"});
    // Ranks that want different things.
    expect_refusal(layer->begin_rearrange(random_map(rank == 2 ? 7 : 8, 12, 16)),
                   StatusCode::kInvalidArgument, {"rearrange"});
    std::vector<std::int32_t> lost(16, 0);
    expect_refusal(layer->begin_rearrange(lost), StatusCode::kInvalidArgument,
                   {"expert 1 has no slot"});
    expect_refusal(layer->begin_rearrange(random_map(1, 12, 20)), StatusCode::kInvalidArgument,
                   {"wanted: got 20 slots, need 16"});
    EXPECT_TRUE(layer->begin_rearrange(random_map(1, 12, 16)).ok());
    expect_refusal(layer->begin_rearrange(random_map(1, 12, 16)), StatusCode::kInvalidArgument,
                   {"one is in flight"});
    for (bool done = false; !done;) done = layer->continue_rearrange(1).value();
    return f.forward(*layer, rank);
  });
  for (const std::string& w : said) EXPECT_EQ(w, "");

  const auto refused = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
    FusedMoE::Options o = options_of(rank, 4, RankTransport::kAllToAll, c);
    o.ranks.num_redundant_experts = 3;
    expect_refusal(FusedMoE::create(f.tensors.weights(), o).status(), StatusCode::kInvalidArgument,
                   {"num_redundant_experts: got 3", "multiple of the 4 ranks"});
    o.ranks.num_redundant_experts = 4;
    o.ranks.enable_eplb = false;
    expect_refusal(FusedMoE::create(f.tensors.weights(), o).status(), StatusCode::kInvalidArgument,
                   {"num_redundant_experts: got 4 without enable_eplb"});
    o.ranks.enable_eplb = true;
    o.parallel.placement = ExpertPlacement::kRoundRobin;
    expect_refusal(FusedMoE::create(f.tensors.weights(), o).status(), StatusCode::kUnsupported,
                   {"enable_eplb", "linear placement"});
    return "";
  });
  static_cast<void>(refused);
  FusedMoE::Options alone;
  auto layer = FusedMoE::create(f.tensors.weights(), alone);
  ASSERT_TRUE(layer.ok());
  expect_refusal(layer->begin_rebalance(), StatusCode::kUnsupported, {"enable_eplb: got false"});
  alone.ranks.enable_eplb = true;
  expect_refusal(FusedMoE::create(f.tensors.weights(), alone).status(), StatusCode::kUnsupported,
                 {"enable_eplb: got true on one rank"});
}

}  // namespace
}  // namespace moesaic
