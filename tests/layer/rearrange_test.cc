// Experts move between ranks (threads) while a layer serves.
#include <gtest/gtest.h>

#include "layer/eplb_case.h"
#include "moesaic/eplb.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::eplb_options;
using test::EplbFixture;
using test::expect_refusal;
using test::on_ranks;
using test::random_map;

constexpr int kRanks = test::kEplbRanks;

template <class Change>
Status explain_with(const EplbFixture& f, FusedMoE::Options options, Change&& change) {
  change(options.ranks);
  return explain_layer(f.tensors.spec, options).status();
}

TEST(Rearrange, TheOutputDoesNotChangeByABitInMidStream) {
  const EplbFixture f(test::eplb_spec());
  for (const auto& [transport, dp] :
       {std::pair{RankTransport::kAllToAll, 4}, std::pair{RankTransport::kBatched, 4},
        std::pair{RankTransport::kGather, 2}, std::pair{RankTransport::kNone, 1},
        std::pair{RankTransport::kAllToAll, 2}}) {
    const auto wrong = on_ranks(
        [&, t = transport, engines = dp](int rank, std::shared_ptr<Communicator> c) -> std::string {
          auto layer = FusedMoE::create(f.tensors.weights(), eplb_options(rank, engines, t, c));
          if (!layer.ok()) return layer.status().to_string();
          return test::serve_while_experts_move(*layer, f, rank * engines / kRanks);
        });
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(wrong[static_cast<std::size_t>(r)], "")
          << "rank " << r << " " << rank_transport_name(transport) << " dp " << dp;
    }
  }
}

TEST(Rearrange, MeasuredLoadCountsEveryRowOnceAndForgets) {
  const EplbFixture f(test::eplb_spec());
  for (const int dp : {4, 2}) {
    const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
      auto layer = FusedMoE::create(f.tensors.weights(),
                                    eplb_options(rank, dp, RankTransport::kAllToAll, c));
      if (!layer.ok()) return layer.status().to_string();
      return test::measure_five_calls(*layer, f, rank * dp / kRanks, dp);
    });
    for (const std::string& w : wrong) EXPECT_EQ(w, "") << "dp " << dp;
  }
}

TEST(Rearrange, AnUnchangedMapMovesNothing) {
  const EplbFixture f(test::eplb_spec());
  const auto wrong = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
    auto layer =
        FusedMoE::create(f.tensors.weights(), eplb_options(rank, 4, RankTransport::kAllToAll, c));
    if (!layer.ok()) return layer.status().to_string();
    const std::int64_t before = layer->bytes_sent();
    const Status begun = layer->begin_rearrange(layer->physical_to_logical());
    if (!begun.ok()) return begun.to_string();
    int calls = 0;
    for (bool done = false; !done; ++calls) done = layer->continue_rearrange().value();
    // Agreement: 8 bytes to each of three peers, in begin, on max_transfers and per call.
    const std::int64_t sent = layer->bytes_sent() - before;
    if (sent != 24 * (2 + calls)) return "sent " + std::to_string(sent);
    return f.forward(*layer, rank);
  });
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

TEST(Rearrange, RefusesByName) {
  const EplbFixture f(test::eplb_spec());
  const auto said = on_ranks([&](int rank, std::shared_ptr<Communicator> c) -> std::string {
    auto layer =
        FusedMoE::create(f.tensors.weights(), eplb_options(rank, 4, RankTransport::kAllToAll, c));
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
    FusedMoE::Options o = eplb_options(rank, 4, RankTransport::kAllToAll, c);
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
  // Six ranks with the same rows count each of them once, in whole numbers.
  const auto counted = on_ranks(
      [&](int rank, std::shared_ptr<Communicator> c) -> std::string {
        FusedMoE::Options o = eplb_options(rank, 1, RankTransport::kAuto, c);
        o.parallel.ep_size = 6;
        o.parallel.dp_rank = 0;
        o.ranks.num_redundant_experts = 6;
        auto layer = FusedMoE::create(f.tensors.weights(), o);
        if (!layer.ok()) return layer.status().to_string();
        if (rank == 0) {
          expect_refusal(explain_with(f, o, [](auto& w) { w.eplb_window = 0; }),
                         StatusCode::kInvalidArgument, {"eplb_window: got 0"});
          expect_refusal(explain_with(f, o, [](auto& w) { w.eplb_window = std::int64_t{1} << 60; }),
                         StatusCode::kLimitExceeded, {"eplb_window: got 1152921504606846976"});
          expect_refusal(explain_with(f, o, [](auto& w) { w.num_redundant_experts = 5; }),
                         StatusCode::kInvalidArgument, {"num_redundant_experts: got 5"});
        }
        return test::measure_five_calls(*layer, f, 0, 1, 1e-5);
      },
      6);
  for (const std::string& w : counted) EXPECT_EQ(w, "");
  auto layer = FusedMoE::create(f.tensors.weights(), {});
  ASSERT_TRUE(layer.ok());
  expect_refusal(layer->begin_rebalance(), StatusCode::kUnsupported, {"enable_eplb: got false"});
  expect_refusal(layer->set_eplb_recording(false), StatusCode::kUnsupported,
                 {"enable_eplb: got false"});
  expect_refusal(layer->plan_rebalance(std::vector<double>(12, 1.0)).status(),
                 StatusCode::kUnsupported, {"enable_eplb: got false"});
  // Several ranks that do not talk to each other: the caller measures and moves.
  FusedMoE::Options silent = eplb_options(1, 4, RankTransport::kAuto, nullptr);
  auto part = FusedMoE::create(f.tensors.weights(), silent);
  ASSERT_TRUE(part.ok()) << part.status().to_string();
  expect_refusal(part->measured_load().status(), StatusCode::kUnsupported,
                 {"measured_load", "without a communicator on 4 ranks"});
  expect_refusal(part->begin_rearrange(part->physical_to_logical()), StatusCode::kUnsupported,
                 {"begin_rearrange", "without a communicator on 4 ranks"});
  expect_refusal(part->plan_rebalance(std::vector<double>(11, 1.0)).status(),
                 StatusCode::kInvalidArgument, {"load: got 11 experts, need 12"});
}

}  // namespace
}  // namespace moesaic
