// What can happen next in a state of the model.
#include <algorithm>
#include <bit>

#include "parallel/peer_model.h"
#include "parallel/peer_model_values.h"

namespace moesaic::peer_model {

// Ends a rank with a report, which it sends to all others.
void Model::end_reporting(State& s, int rank, int named) const {
  s.status[rank] = Rank::kReported;
  s.report[rank] = static_cast<std::uint8_t>(named);
  if (protocol_.mutant == Mutant::kReportNotSent) return;
  for (int other = 0; other < protocol_.ranks; ++other) {
    if (other != rank && s.status[other] != Rank::kDead) {
      s.abort_to[rank] = static_cast<std::uint8_t>(s.abort_to[rank] | 1 << other);
    }
  }
}

Model::Progress Model::step(State& s, int rank, Violation& violation) const {
  const Step now = program_[s.at[rank]];
  if (const auto piece = waited_for(now)) {
    const Seen seen = look(s, rank, *piece);
    violation = seen.violation;
    if (violation) return Progress::kGoesOn;
    if (seen.other_call != 0) {
      end_reporting(s, rank, seen.other_call);
      return Progress::kEnds;
    }
    if (seen.missing != 0) return Progress::kWaits;
  }
  switch (now) {
    case Step::kStoreIds:
      violation = store(s, rank, kIds);
      break;
    case Step::kStoreRows:
      violation = store(s, rank, kRows);
      break;
    case Step::kStoreAnswers:
      violation = store(s, rank, kAnswers);
      break;
    case Step::kPublishIds:
      publish(s, rank, kIds);
      break;
    case Step::kPublishRows:
      publish(s, rank, kRows);
      break;
    case Step::kPublishAnswers:
      publish(s, rank, kAnswers);
      break;
    case Step::kReadIds:
      violation = read(s, rank, kIds);
      break;
    case Step::kFirstRead:
    case Step::kLastRead:
      violation = read(s, rank, kRows);
      break;
    case Step::kSum:
      violation = sum(s, rank);
      break;
    case Step::kWaitIds:
    case Step::kWaitRows:
    case Step::kWaitAnswers:
      break;
  }
  if (++s.at[rank] < kSteps) return Progress::kGoesOn;
  if (s.call[rank] == s.last) {
    s.status[rank] = Rank::kDone;
    return Progress::kEnds;
  }
  ++s.call[rank];
  s.at[rank] = 0;
  return Progress::kGoesOn;
}

// The survivors have met: nothing of theirs is under way any more, and they go on with the call
// after the last that any of them began.
void Model::recover(State& s) const {
  int newest = 0, oldest = kMaxCalls;
  for (int r = 0; r < protocol_.ranks; ++r) {
    if (s.status[r] == Rank::kDead) continue;
    newest = std::max<int>(newest, s.call[r]);
    oldest = std::min<int>(oldest, s.call[r] - 1);
    for (int to = 0; to < protocol_.ranks; ++to) {
      if (s.status[to] == Rank::kDead || to == r) continue;
      for (const Piece piece : kEachPiece) {
        std::uint8_t& data = s.data[r][to][piece];
        std::uint8_t& word = s.word[r][to][piece];
        data = static_cast<std::uint8_t>(stored(s, r, kStores[piece], data));
        word = static_cast<std::uint8_t>(stored(s, r, kPublishes[piece], word));
      }
    }
  }
  s.first = static_cast<std::uint8_t>(newest + 1);
  s.oldest = static_cast<std::uint8_t>(oldest);
  s.last = static_cast<std::uint8_t>(newest + 2);
  for (int r = 0; r < protocol_.ranks; ++r) {
    s.abort_word[r] = s.abort_to[r] = s.report[r] = 0;
    if (s.status[r] == Rank::kDead) continue;
    s.status[r] = Rank::kRunning;
    s.call[r] = s.first;
    s.at[r] = 0;
  }
}

// The ranks, as bits, that have published the word that this rank waits for in its call.
int Model::published(const State& s, int rank, Piece piece) const {
  int ranks = 0;
  for (int r = 0; r < protocol_.ranks; ++r) {
    if (stored(s, r, kPublishes[piece], 0) >= s.call[rank]) ranks |= 1 << r;
  }
  return ranks;
}

void Model::rank_moves(const State& s, int rank, std::vector<Move>& out) const {
  const Step now = program_[s.at[rank]];
  Move move{MoveKind::kStep, rank, 0, static_cast<int>(now), s, std::nullopt};
  bool moved = false;
  for (;;) {
    const Progress progress = step(move.after, rank, move.violation);
    moved |= progress != Progress::kWaits;
    if (!protocol_.merged || progress != Progress::kGoesOn || move.violation) break;
    if (!joins_the_step_before(program_[move.after.at[rank]])) break;
  }
  if (moved) out.push_back(move);

  if (const auto piece = waited_for(now)) {
    int dead = 0, gone = 0;
    for (int r = 0; r < protocol_.ranks; ++r) {
      if (s.status[r] == Rank::kDead) dead |= 1 << r;
      if (s.status[r] == Rank::kDead || s.status[r] == Rank::kReported) gone |= 1 << r;
    }
    const int missing = look(s, rank, *piece).missing;
    // A store is under way for microseconds, a rank waits for seconds: what a rank published before
    // it ended, its report too, has arrived when others run out of time, unless the rank is dead.
    int under_way = published(s, rank, *piece) & ~dead;
    for (int r = 0; r < protocol_.ranks; ++r) {
      if ((s.abort_to[r] & 1 << rank) != 0) under_way |= 1 << r;
    }
    const bool in_time =
        (missing & gone) == 0 || (missing & under_way) != 0 || s.abort_word[rank] != 0;
    const bool late = s.late != 0 && missing != 0;
    if ((!in_time && protocol_.mutant != Mutant::kNoTimeOut) || late) {
      Move out_of_time{MoveKind::kTimeOut, rank, 0, static_cast<int>(now), s, std::nullopt};
      const int named =
          protocol_.mutant == Mutant::kNamesFirstMissing ? missing & -missing : missing;
      end_reporting(out_of_time.after, rank, named);
      if (late) out_of_time.after.late = 0;
      if (dead != 0 && (named & dead) == 0) out_of_time.violation = Property::kDeadNotNamed;
      out.push_back(out_of_time);
    }
    if (s.abort_word[rank] != 0) {
      Move seen{MoveKind::kAbortSeen, rank, 0, static_cast<int>(now), s, std::nullopt};
      seen.after.status[rank] = Rank::kReported;
      seen.after.report[rank] = s.abort_word[rank];
      if (dead != 0 && (s.abort_word[rank] & dead) == 0) seen.violation = Property::kDeadNotNamed;
      out.push_back(seen);
    }
  }
  const bool mortal =
      protocol_.failure == Failure::kDies || protocol_.failure == Failure::kDiesThenMasked;
  const bool all_live = std::count(s.status, s.status + protocol_.ranks, Rank::kDead) == 0;
  if (mortal && all_live) {
    Move dies{MoveKind::kDies, rank, 0, static_cast<int>(now), s, std::nullopt};
    dies.after.status[rank] = Rank::kDead;
    out.push_back(dies);
  }
}

void Model::arrivals(const State& s, int writer, int reader, std::vector<Move>& out) const {
  if ((s.abort_to[writer] & 1 << reader) != 0) {
    Move move{MoveKind::kAbort, writer, reader, 0, s, std::nullopt};
    State& t = move.after;
    t.abort_to[writer] = static_cast<std::uint8_t>(t.abort_to[writer] & ~(1 << reader));
    if (t.status[reader] == Rank::kRunning) t.abort_word[reader] = s.report[writer];
    out.push_back(move);
  }
  if (masked(s, reader)) return;
  // The stores of one call to one place arrive in order; the survivors' first call follows on
  // whatever there was.
  const auto next = [&](int seen) { return s.call[writer] == s.first ? s.call[writer] : seen + 1; };
  for (const Piece piece : kEachPiece) {
    const int data = s.data[writer][reader][piece], word = s.word[writer][reader][piece];
    if (!protocol_.extremes && stored(s, writer, kStores[piece], data) > data) {
      Move move{MoveKind::kData, writer, reader, piece, s, overwrites(s, writer, reader, piece)};
      move.after.data[writer][reader][piece] = static_cast<std::uint8_t>(next(data));
      out.push_back(move);
    }
    if (stored(s, writer, kPublishes[piece], word) > word) {
      const int call = next(word);
      const bool lost = protocol_.mutant == Mutant::kWordLost && writer == 0 && reader == 1 &&
                        piece == kAnswers && call == 2;
      if (lost || !released(s, writer, reader, piece, call)) continue;
      Move move{MoveKind::kWord, writer, reader, piece, s, std::nullopt};
      arrive_word(move.after, writer, reader, piece, call);
      out.push_back(move);
    }
  }
}

void Model::moves(const State& s, std::vector<Move>& out) const {
  out.clear();
  for (int r = 0; r < protocol_.ranks; ++r) {
    if (s.status[r] == Rank::kRunning) rank_moves(s, r, out);
  }
  for (int writer = 0; writer < protocol_.ranks; ++writer) {
    for (int reader = 0; reader < protocol_.ranks; ++reader) {
      if (writer != reader) arrivals(s, writer, reader, out);
    }
  }
  if (protocol_.failure != Failure::kDiesThenMasked || s.first != 0) return;
  const auto have = [&](Rank status) {
    return std::count(s.status, s.status + protocol_.ranks, status) != 0;
  };
  if (have(Rank::kDead) && have(Rank::kReported) && !have(Rank::kRunning)) {
    Move move{MoveKind::kRecover, 0, 0, 0, s, std::nullopt};
    recover(move.after);
    out.push_back(move);
  }
}

// What a dead rank stored may never arrive, so nobody may wait for it; nor does a rank have to die,
// or a time-out come without a reason.
bool Model::is_end(const State& s, const std::vector<Move>& out) const {
  return std::all_of(out.begin(), out.end(), [&](const Move& move) {
    if (move.kind == MoveKind::kDies) return true;
    if (move.kind == MoveKind::kTimeOut) return s.late != 0;
    return move.kind >= MoveKind::kData && s.status[move.rank] == Rank::kDead;
  });
}

std::optional<Property> Model::judge_end(const State& s) const {
  for (int r = 0; r < protocol_.ranks; ++r) {
    const bool must_finish = protocol_.failure == Failure::kNone || s.first != 0;
    if (s.status[r] == Rank::kRunning) return Property::kStuck;
    if (must_finish && s.status[r] == Rank::kReported) return Property::kNotFinished;
    if (protocol_.failure == Failure::kOtherCall && s.status[r] == Rank::kDone) {
      return Property::kNotReported;
    }
  }
  return std::nullopt;
}

}  // namespace moesaic::peer_model
