#include "parallel/peer_model.h"

#include <algorithm>
#include <iterator>

#include "parallel/peer_control.h"
#include "parallel/peer_model_values.h"

namespace moesaic::peer_model {

namespace {

using parallel::PeerVerdict;

// Epochs begin so that the second call's wraps.
std::uint32_t epoch(int call) { return 0xFFFFFFFEU + static_cast<std::uint32_t>(call); }
std::uint32_t live(int rank, int call) { return static_cast<std::uint32_t>(rank + 2 * call) % 4; }
constexpr std::uint32_t kCapacity = 3;
// What a rank answers in a call: sums of different sets of these differ.
int answer(int rank, int call) { return (1 << (4 * rank)) * call; }
// Mutant::kSkipsIdlePeer: whose answers a rank does without.
bool is_idle_peer(const Protocol& protocol, int source, int rank) {
  return protocol.mutant == Mutant::kSkipsIdlePeer && source == (rank + 1) % protocol.ranks;
}

}  // namespace

Model::Model(const Protocol& protocol) : protocol_(protocol) {
  for (int i = 0; i < kSteps; ++i) program_[i] = static_cast<Step>(i);
  const auto put_before = [this](Step moved, Step target) {
    Step* const from = std::find(std::begin(program_), std::end(program_), moved);
    Step* const to = std::find(std::begin(program_), std::end(program_), target);
    if (from < to) {
      std::rotate(from, from + 1, to);
    } else {
      std::rotate(to, from, from + 1);
    }
  };
  switch (protocol.mutant) {
    case Mutant::kWordBeforeData:
      put_before(Step::kPublishRows, Step::kStoreRows);
      break;
    case Mutant::kReadsPreviousIds:
      put_before(Step::kReadIds, Step::kWaitIds);
      break;
    case Mutant::kReadsRowsBeforeWait:
      put_before(Step::kFirstRead, Step::kWaitRows);
      break;
    case Mutant::kAnswersBeforeLastRow:
      put_before(Step::kLastRead, Step::kWaitAnswers);
      break;
    default:
      break;
  }
  for (int i = 0; i < kSteps; ++i) position_[static_cast<int>(program_[i])] = i;
  judge_words();
}

// Every word that can be seen, by every reader that can wait: there are few, so they are judged
// once.
void Model::judge_words() {
  for (int writer = 0; writer < protocol_.ranks; ++writer) {
    for (const Piece piece : kEachPiece) {
      const auto signature = [piece](bool strays) {
        return parallel::peer_signature((strays ? 0xBF58476D1CE4E5B9U : 0x9E3779B97F4A7C15U) *
                                        (piece + 1U));
      };
      for (int seen = 0; seen <= kMaxCalls; ++seen) {
        const bool strays = strays_in(protocol_, writer, seen);
        const int counted = protocol_.mutant == Mutant::kLiveOfPreviousCall ? seen - 1 : seen;
        const std::uint32_t rows = seen == 0 ? 0 : live(writer, counted);
        const parallel::PeerWord word = parallel::unpack_peer_word(
            parallel::pack_peer_word({epoch(seen), rows, signature(strays)}));
        for (int now = 1; now <= kMaxCalls; ++now) {
          for (int before = 0; before < now; ++before) {
            for (const bool reader_strays : {false, true}) {
              PeerVerdict verdict = parallel::judge_peer_word(
                  word, {epoch(now), epoch(before), signature(reader_strays), kCapacity});
              if (protocol_.mutant == Mutant::kStaleEpochAccepted &&
                  verdict == PeerVerdict::kNotYet) {
                verdict = PeerVerdict::kReady;
              }
              judged_[writer][reader_strays ? 1 : 0][piece][seen][now][before] = {
                  static_cast<std::uint8_t>(verdict), word.live == live(writer, now)};
            }
          }
        }
      }
    }
  }
}

State Model::start() const {
  State s;
  for (int r = 0; r < protocol_.ranks; ++r) s.call[r] = 1;
  s.last = static_cast<std::uint8_t>(protocol_.calls);
  s.late = protocol_.failure == Failure::kLate ? 1 : 0;
  return s;
}

bool Model::masked(const State& s, int rank) const {
  return s.first != 0 && s.status[rank] == Rank::kDead;
}

// Whether the reader is through with what came in `call`. A rank that has ended reads nothing more,
// and survivors begin with a call of their own.
bool Model::has_read(const State& s, int reader, Piece piece, int call) const {
  if (call == 0 || call < s.first || s.status[reader] != Rank::kRunning) return true;
  if (s.call[reader] != call) return s.call[reader] > call;
  return s.at[reader] > position(kLastReads[piece]);
}

// The call of the newest data (by a store) or word (by its publication) of a writer. `seen`: by the
// reader, which is all there is until the survivors' first call has stored something.
int Model::stored(const State& s, int writer, Step by, int seen) const {
  if (s.at[writer] > position(by)) return s.call[writer];
  return s.call[writer] == s.first ? seen : s.call[writer] - 1;
}

std::optional<Property> Model::overwrites(const State& s, int writer, int reader,
                                          Piece piece) const {
  if (has_read(s, reader, piece, s.data[writer][reader][piece])) return std::nullopt;
  return Property::kOverwrittenUnread;
}

// A rank's own window is written in program order; what goes to others is under way from now on.
std::optional<Property> Model::store(State& s, int rank, Piece piece) const {
  for (int reader = 0; reader < protocol_.ranks; ++reader) {
    if (masked(s, reader)) continue;
    if (reader != rank && !protocol_.extremes) continue;
    if (reader != rank) {
      // The newest data in that slot, arrived or not, is that of the writer's call before.
      const int before = s.call[rank] == s.first ? 0 : s.call[rank] - 1;
      if (!has_read(s, reader, piece, before)) return Property::kOverwrittenUnread;
      continue;
    }
    if (Violation v = overwrites(s, rank, rank, piece)) return v;
    s.data[rank][rank][piece] = s.call[rank];
  }
  return std::nullopt;
}

void Model::publish(State& s, int rank, Piece piece) const {
  s.word[rank][rank][piece] = s.call[rank];
}

// Whether all that its writer stored and published before a word has arrived.
bool Model::released(const State& s, int writer, int reader, Piece piece, int call) const {
  if (protocol_.mutant == Mutant::kWordOvertakesData) return true;
  for (const Piece other : kEachPiece) {
    const auto needed = [&](Step by) {
      if (position(by) < position(kPublishes[piece])) return call;
      return call == s.first ? 0 : call - 1;
    };
    if (!protocol_.extremes && s.data[writer][reader][other] < needed(kStores[other])) return false;
    if (other != piece && s.word[writer][reader][other] < needed(kPublishes[other])) return false;
  }
  return true;
}

void Model::arrive_word(State& s, int writer, int reader, Piece piece, int call) const {
  s.word[writer][reader][piece] = static_cast<std::uint8_t>(call);
  if (!protocol_.extremes || protocol_.mutant == Mutant::kWordOvertakesData) return;
  for (const Piece other : kEachPiece) {
    if (position(kStores[other]) > position(kPublishes[piece])) continue;
    std::uint8_t& data = s.data[writer][reader][other];
    data = std::max(data, static_cast<std::uint8_t>(call));
  }
}

std::optional<Property> Model::read(const State& s, int rank, Piece piece) const {
  for (int source = 0; source < protocol_.ranks; ++source) {
    if (masked(s, source)) continue;
    if (piece == kAnswers && is_idle_peer(protocol_, source, rank)) continue;
    const int found = s.data[source][rank][piece];
    if (found < s.call[rank]) return Property::kReadBeforeWritten;
    if (found > s.call[rank]) return Property::kOverwrittenUnread;
  }
  return std::nullopt;
}

std::optional<Property> Model::sum(const State& s, int rank) const {
  if (Violation v = read(s, rank, kAnswers)) return v;
  const int ranks = protocol_.ranks - (protocol_.mutant == Mutant::kSumForgetsLastRank ? 1 : 0);
  int got = 0, need = 0;
  for (int source = 0; source < protocol_.ranks; ++source) {
    if (masked(s, source) || is_idle_peer(protocol_, source, rank)) continue;
    need += answer(source, s.call[rank]);
    if (source < ranks) got += answer(source, s.data[source][rank][kAnswers]);
  }
  return got == need ? std::nullopt : Violation(Property::kWrongSum);
}

// What a waiter sees of the words that it waits for.
Model::Seen Model::look(const State& s, int rank, Piece piece) const {
  Seen seen;
  const int call = s.call[rank];
  const int before = call == s.first ? s.oldest : call - 1;
  const int strays = strays_in(protocol_, rank, call) ? 1 : 0;
  for (int source = 0; source < protocol_.ranks; ++source) {
    if (masked(s, source) && protocol_.mutant != Mutant::kWaitsForMasked) continue;
    if (protocol_.mutant == Mutant::kWaitsForAllButLast && piece == kRows &&
        source == protocol_.ranks - 1) {
      continue;
    }
    if (piece == kAnswers && is_idle_peer(protocol_, source, rank)) continue;
    const Judged& judged =
        judged_[source][strays][piece][s.word[source][rank][piece]][call][before];
    switch (static_cast<PeerVerdict>(judged.verdict)) {
      case PeerVerdict::kReady:
        if (!judged.live_right) seen.violation = Property::kWrongLive;
        break;
      case PeerVerdict::kNotYet:
        seen.missing |= 1 << source;
        break;
      case PeerVerdict::kOtherCall:
        seen.other_call |= 1 << source;
        if (protocol_.failure == Failure::kOtherCall) break;
        [[fallthrough]];
      default:
        seen.violation = Property::kWordRefused;
    }
  }
  return seen;
}

}  // namespace moesaic::peer_model
