// The protocol of peer windows, in every order of events; and that wrong protocols are refused.
#include "parallel/peer_model.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace moesaic::peer_model {
namespace {

std::string shape_of(const Protocol& s) {
  constexpr const char* kFailureNames[] = {"no failure", "one dies", "one dies and is masked",
                                           "one time-out too early", "one in another call"};
  return fmt::format("{} ranks, {} calls, {}{}{}", s.ranks, s.calls,
                     kFailureNames[static_cast<int>(s.failure)], s.merged ? ", merged steps" : "",
                     s.extremes ? ", extremes of arrival" : "");
}

Exploration expect_right(const Protocol& protocol) {
  const Exploration e = explore(protocol);
  fmt::print("{}: {} states, {} transitions, {} ends\n", shape_of(protocol), e.states,
             e.transitions, e.ends);
  EXPECT_FALSE(e.violation) << shape_of(protocol) << ": " << property_name(*e.violation) << "\n"
                            << e.trace;
  EXPECT_GT(e.states, 100);
  EXPECT_GT(e.ends, 0);
  return e;
}

constexpr Failure kFailures[] = {Failure::kNone, Failure::kDies, Failure::kDiesThenMasked,
                                 Failure::kLate, Failure::kOtherCall};

TEST(PeerModel, TwoRanksStepByStep) {
  for (const Failure failure : kFailures) expect_right({.ranks = 2, .failure = failure});
}

// What the reductions leave out is nothing that can happen: so they find the same.
TEST(PeerModel, TwoRanksReduced) {
  for (const Failure failure : kFailures) {
    const std::int64_t all = expect_right({.ranks = 2, .failure = failure}).states;
    for (const auto& [merged, extremes] : {std::pair(true, false), {false, true}, {true, true}}) {
      const Protocol protocol{
          .ranks = 2, .failure = failure, .merged = merged, .extremes = extremes};
      EXPECT_LT(expect_right(protocol).states, all);
    }
  }
}

TEST(PeerModel, ThreeRanksWithEachArrivalOfData) { expect_right({.ranks = 3, .merged = true}); }

TEST(PeerModel, ThreeRanksReduced) {
  for (const Failure failure : kFailures) {
    Protocol protocol{.ranks = 3, .failure = failure, .merged = true, .extremes = true};
    // A time-out without a reason may come anywhere: fewer calls.
    if (failure == Failure::kLate) protocol.calls = 2;
    expect_right(protocol);
  }
}

TEST(PeerModel, IsTheSameEachTime) {
  const Protocol protocol{.ranks = 2, .failure = Failure::kDiesThenMasked};
  const Exploration first = explore(protocol), second = explore(protocol);
  EXPECT_EQ(first.states, second.states);
  EXPECT_EQ(first.transitions, second.transitions);
  EXPECT_EQ(first.ends, second.ends);
}

TEST(PeerModel, AStatePacksWithoutLoss) {
  const Model model({.ranks = 3, .failure = Failure::kDiesThenMasked});
  State s = model.start();
  std::vector<Move> moves;
  for (int i = 0; i < 300; ++i) {
    model.moves(s, moves);
    if (moves.empty()) break;
    for (const Move& move : moves) {
      EXPECT_TRUE(unpack(pack(move.after)) == move.after) << move_text(move);
      EXPECT_NE(pack(move.after), pack(s)) << move_text(move);
    }
    s = moves[static_cast<std::size_t>(i * 7) % moves.size()].after;
  }
}

struct Refusal {
  Mutant mutant;
  const char* name;
  int ranks;
  Failure failure;
  Property property;
};
constexpr Refusal kRefusals[] = {
    {Mutant::kWordOvertakesData, "word overtakes data", 2, Failure::kNone,
     Property::kReadBeforeWritten},
    {Mutant::kWordBeforeData, "word before data", 2, Failure::kNone, Property::kReadBeforeWritten},
    {Mutant::kWordLost, "word lost", 2, Failure::kNone, Property::kStuck},
    {Mutant::kStaleEpochAccepted, "stale epoch accepted", 2, Failure::kNone, Property::kWrongLive},
    {Mutant::kLiveOfPreviousCall, "live of the previous call", 2, Failure::kNone,
     Property::kWrongLive},
    {Mutant::kReadsPreviousIds, "ids of the previous call", 2, Failure::kNone,
     Property::kReadBeforeWritten},
    {Mutant::kReadsRowsBeforeWait, "rows read before the wait", 2, Failure::kNone,
     Property::kReadBeforeWritten},
    {Mutant::kAnswersBeforeLastRow, "answers before the last row is read", 2, Failure::kNone,
     Property::kOverwrittenUnread},
    {Mutant::kWaitsForAllButLast, "no wait for the last rank's rows", 2, Failure::kNone,
     Property::kReadBeforeWritten},
    {Mutant::kSkipsIdlePeer, "no wait for a rank without answers", 2, Failure::kNone,
     Property::kOverwrittenUnread},
    {Mutant::kSkipsIdlePeer, "no wait for a rank without answers", 3, Failure::kNone,
     Property::kOverwrittenUnread},
    {Mutant::kSumForgetsLastRank, "sum forgets the last rank", 2, Failure::kNone,
     Property::kWrongSum},
    {Mutant::kNoTimeOut, "no time-out", 2, Failure::kDies, Property::kStuck},
    {Mutant::kNoTimeOut, "no time-out", 3, Failure::kDies, Property::kStuck},
    {Mutant::kNamesFirstMissing, "a report names the first missing rank", 3, Failure::kDies,
     Property::kDeadNotNamed},
    {Mutant::kReportNotSent, "a report is kept from the others", 3, Failure::kDies,
     Property::kDeadNotNamed},
    {Mutant::kWaitsForMasked, "a masked rank is waited for", 2, Failure::kDiesThenMasked,
     Property::kNotFinished},
    {Mutant::kWaitsForMasked, "a masked rank is waited for", 3, Failure::kDiesThenMasked,
     Property::kNotFinished},
};

TEST(PeerModel, RefusesEveryWrongProtocol) {
  for (const Refusal& r : kRefusals) {
    for (const auto& [merged, extremes] :
         {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
      if (r.ranks == 3 && !(merged && extremes)) continue;
      const Protocol protocol{.ranks = r.ranks,
                              .failure = r.failure,
                              .mutant = r.mutant,
                              .merged = merged,
                              .extremes = extremes};
      const Exploration e = explore(protocol);
      ASSERT_TRUE(e.violation) << r.name << ", " << shape_of(protocol) << ": not refused";
      EXPECT_STREQ(property_name(*e.violation), property_name(r.property))
          << r.name << ", " << shape_of(protocol) << "\n"
          << e.trace;
      EXPECT_FALSE(e.trace.empty());
      if (merged && extremes) {
        fmt::print("{} ({} ranks): {}\n", r.name, r.ranks, property_name(*e.violation));
      }
    }
  }
}

TEST(PeerModel, EveryWrongProtocolIsListed) {
  for (int m = 1; m <= static_cast<int>(Mutant::kWaitsForMasked); ++m) {
    bool listed = false;
    for (const Refusal& r : kRefusals) listed |= static_cast<int>(r.mutant) == m;
    EXPECT_TRUE(listed) << m;
  }
}

}  // namespace
}  // namespace moesaic::peer_model
