// A model of ranks that exchange rows through peer windows with one set of buffers, small enough to
// run through everything that can happen. Words are made, read and judged by the functions of
// parallel/peer_control.h. What the model leaves out is in docs/design/peer-windows.md.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moesaic::peer_model {

inline constexpr int kMaxRanks = 3;
inline constexpr int kCalls = 3;
inline constexpr int kMaxCalls = 5;  // with two more by the survivors of a dead rank

// What a rank sends in a call, each with a word of its own.
enum Piece : std::uint8_t { kIds, kRows, kAnswers, kPieces };

// One call of one rank, in program order.
enum class Step : std::uint8_t {
  kStoreIds,
  kPublishIds,
  kStoreRows,
  kPublishRows,
  kWaitIds,
  kReadIds,  // the work list
  kWaitRows,
  kFirstRead,  // the first and the last row that the GEMM reads
  kLastRead,
  kStoreAnswers,
  kPublishAnswers,
  kWaitAnswers,
  kSum,
};
inline constexpr int kSteps = 13;

enum class Failure : std::uint8_t {
  kNone,
  kDies,            // any one rank, at any step; what it has stored may still arrive, or not
  kDiesThenMasked,  // the survivors agree on the next call and make two more without it
  kLate,            // one time-out, anywhere, although nobody is dead
  kOtherCall,       // the last rank is in another call than the others, the second time
};

// Wrong variants of the protocol; the explorer must refuse each.
enum class Mutant : std::uint8_t {
  kNone,
  kWordOvertakesData,     // no release: a word may be seen before what it stands for
  kWordBeforeData,        // the word of the rows is published before they are stored
  kWordLost,              // one word never arrives
  kStaleEpochAccepted,    // the word of the previous call counts
  kLiveOfPreviousCall,    // the word has the number of rows of the call before
  kReadsPreviousIds,      // the work list is made before the wait for ids
  kReadsRowsBeforeWait,   // no acquire: the first row is read before the wait
  kAnswersBeforeLastRow,  // answers are published while rows are still read
  kWaitsForAllButLast,    // the wait for rows leaves out the last rank
  kSkipsIdlePeer,         // nobody waits for answers of a rank that has none for it
  kSumForgetsLastRank,
  kNoTimeOut,
  kNamesFirstMissing,  // a time-out names the lowest rank whose word is missing, not all of them
  kReportNotSent,      // a rank that runs out of time does not tell the others
  kWaitsForMasked,     // survivors wait for a rank that they have masked
};

enum class Property : std::uint8_t {
  kOverwrittenUnread,
  kReadBeforeWritten,
  kWrongLive,
  kWordRefused,  // a word that should be right is judged to be of another call, stale, ...
  kWrongSum,
  kStuck,        // a rank that lives never ends
  kNotFinished,  // a rank reports although nobody died, or is masked
  kNotReported,  // a rank finishes a call that others were not in
  kDeadNotNamed,
};
const char* property_name(Property p);

struct Protocol {
  int ranks = 2;
  int calls = kCalls;
  Failure failure = Failure::kNone;
  Mutant mutant = Mutant::kNone;
  // Steps of one rank that nobody else can tell apart are one transition. Storing early leaves each
  // store all the time to arrive that it had, and a rank that dies after several stores may lose
  // any of those under way; a wait that is followed by its reads may be taken as late as these; and
  // the last read as late as the stores that follow it. So nothing that can happen is left out.
  bool merged = false;
  // No transitions of their own for data. Data may arrive from the moment it is stored until its
  // word does. Arriving early can only overwrite what is unread, which is worst at the first
  // moment and checked there; arriving late can only be read too early, worst at the last moment,
  // when the word arrives, which is when it arrives here. In between nothing looks at it.
  bool extremes = false;
};

enum class Rank : std::uint8_t { kRunning, kDone, kReported, kDead };

using Packed = std::array<std::uint64_t, 4>;

// Everything that differs between two moments. Numbers of calls count from 1; 0: none.
struct State {
  std::uint8_t call[kMaxRanks] = {}, at[kMaxRanks] = {};  // `at`: the next step of the program
  Rank status[kMaxRanks] = {};
  std::uint8_t report[kMaxRanks] = {};      // ranks that the rank's end named, as bits
  std::uint8_t abort_word[kMaxRanks] = {};  // what others reported, as seen here
  std::uint8_t abort_to[kMaxRanks] = {};    // ranks that have not seen our report yet
  // [writer][reader][piece]: the call whose data, whose word is seen by the reader.
  std::uint8_t data[kMaxRanks][kMaxRanks][kPieces] = {}, word[kMaxRanks][kMaxRanks][kPieces] = {};
  std::uint8_t first = 0;   // first call of the survivors, 0 before
  std::uint8_t oldest = 0;  // then: the call that all words of survivors have reached
  std::uint8_t last = kCalls;
  std::uint8_t late = 0;  // time-outs that may still happen without a reason

  bool operator==(const State&) const = default;
};
Packed pack(const State& s);
State unpack(const Packed& bits);

enum class MoveKind : std::uint8_t {
  kStep,
  kTimeOut,
  kAbortSeen,
  kDies,
  kRecover,
  kData,
  kWord,
  kAbort
};
struct Move {
  MoveKind kind = MoveKind::kStep;
  int rank = 0, reader = 0;  // arrivals: writer and reader
  int what = 0;              // a Step or a Piece
  State after;
  std::optional<Property> violation;
};
std::string move_text(const Move& move);

class Model {
 public:
  explicit Model(const Protocol& protocol);

  State start() const;
  // What may happen next, always in the same order.
  void moves(const State& s, std::vector<Move>& out) const;
  // Of a state whose moves are `out`: whether it is an end, and a wrong one.
  bool is_end(const State& s, const std::vector<Move>& out) const;
  std::optional<Property> judge_end(const State& s) const;

 private:
  using Violation = std::optional<Property>;
  struct Judged {
    std::uint8_t verdict = 0;
    bool live_right = false;
  };
  // As bits of ranks.
  struct Seen {
    int missing = 0, other_call = 0;
    Violation violation;
  };

  void judge_words();
  int position(Step step) const { return position_[static_cast<int>(step)]; }
  bool masked(const State& s, int rank) const;
  bool has_read(const State& s, int reader, Piece piece, int call) const;
  int stored(const State& s, int writer, Step by, int seen) const;
  int published(const State& s, int rank, Piece piece) const;
  bool released(const State& s, int writer, int reader, Piece piece, int call) const;
  Violation overwrites(const State& s, int writer, int reader, Piece piece) const;
  Violation store(State& s, int rank, Piece piece) const;
  void publish(State& s, int rank, Piece piece) const;
  void arrive_word(State& s, int writer, int reader, Piece piece, int call) const;
  Violation read(const State& s, int rank, Piece piece) const;
  Violation sum(const State& s, int rank) const;
  Seen look(const State& s, int rank, Piece piece) const;
  void end_reporting(State& s, int rank, int named) const;
  enum class Progress : std::uint8_t { kWaits, kGoesOn, kEnds };
  Progress step(State& s, int rank, Violation& violation) const;
  void recover(State& s) const;

  void rank_moves(const State& s, int rank, std::vector<Move>& out) const;
  void arrivals(const State& s, int writer, int reader, std::vector<Move>& out) const;

  Protocol protocol_;
  Step program_[kSteps] = {};
  int position_[kSteps] = {};
  // [writer][whether the reader strays][piece][call seen][call waited for][call known before]
  Judged judged_[kMaxRanks][2][kPieces][kMaxCalls + 1][kMaxCalls + 1][kMaxCalls + 1];
};

struct Exploration {
  std::int64_t states = 0, transitions = 0, ends = 0;
  std::optional<Property> violation;
  std::string trace;  // a shortest way to the violation
};
// Visits every state that can be reached, breadth first; ends at the first violation.
Exploration explore(const Protocol& protocol);

}  // namespace moesaic::peer_model
