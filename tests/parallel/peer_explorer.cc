// Visits every state of the model, breadth first, so that a violation is found on a shortest way.
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "parallel/peer_model.h"

namespace moesaic::peer_model {

namespace {

// Writes and reads the fields of a state one after the other.
class PackedBits {
 public:
  explicit PackedBits(Packed& words) : words_(words) {}
  void put(unsigned value, int bits) {
    words_[at_ / 64] |= std::uint64_t{value} << (at_ % 64);
    at_ += static_cast<unsigned>(bits);
  }
  void get(std::uint8_t& value, int bits) {
    value = static_cast<std::uint8_t>(words_[at_ / 64] >> (at_ % 64) & ((1U << bits) - 1U));
    at_ += static_cast<unsigned>(bits);
  }
  // A field of at most `bits` must not lie across two words.
  void room_for(int bits) {
    if (at_ % 64 + static_cast<unsigned>(bits) > 64) at_ = (at_ / 64 + 1) * 64;
  }

 private:
  Packed& words_;
  unsigned at_ = 0;
};

static_assert(kSteps < 16 && kMaxCalls < 8 && kMaxRanks == 3);

// The fields, for both directions.
template <class S, class Field>
void for_each_field(S& s, const Field& field) {
  for (int r = 0; r < kMaxRanks; ++r) {
    field(s.call[r], 3);
    field(s.at[r], 4);
    field(s.report[r], kMaxRanks);
    field(s.abort_word[r], kMaxRanks);
    field(s.abort_to[r], kMaxRanks);
    for (int to = 0; to < kMaxRanks; ++to) {
      for (int piece = 0; piece < kPieces; ++piece) {
        field(s.data[r][to][piece], 3);
        field(s.word[r][to][piece], 3);
      }
    }
  }
  field(s.first, 3);
  field(s.oldest, 3);
  field(s.last, 3);
  field(s.late, 1);
}

// States with their predecessors, found again by open addressing.
class Visited {
 public:
  struct Entry {
    Packed bits;
    std::uint32_t parent;
  };
  // Whether it is new.
  bool add(const Packed& bits, std::uint32_t parent) {
    if ((entries_.size() + 1) * 2 > table_.size()) grow();
    std::uint32_t* const place = find(bits);
    if (*place != kNone) return false;
    *place = static_cast<std::uint32_t>(entries_.size());
    entries_.push_back({bits, parent});
    return true;
  }
  const Entry& operator[](std::size_t i) const { return entries_[i]; }
  std::size_t size() const { return entries_.size(); }

 private:
  static constexpr std::uint32_t kNone = ~0U;
  std::uint32_t* find(const Packed& bits) {
    std::uint64_t h = 0;
    for (const std::uint64_t word : bits) {
      h = (h ^ word) * 0x9E3779B97F4A7C15U;
      h ^= h >> 29;
    }
    const std::size_t mask = table_.size() - 1;
    std::size_t i = h & mask;
    while (table_[i] != kNone && entries_[table_[i]].bits != bits) i = (i + 1) & mask;
    return &table_[i];
  }
  void grow() {
    table_.assign(std::max<std::size_t>(1024, table_.size() * 2), kNone);
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      *find(entries_[i].bits) = static_cast<std::uint32_t>(i);
    }
  }
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> table_;
};

std::string trace_to(const Model& model, const Visited& visited, std::uint32_t last,
                     const Move& violating) {
  std::vector<std::uint32_t> way = {last};
  while (way.back() != 0) way.push_back(visited[way.back()].parent);
  std::reverse(way.begin(), way.end());
  std::string text;
  std::vector<Move> moves;
  for (std::size_t i = 0; i + 1 < way.size(); ++i) {
    model.moves(unpack(visited[way[i]].bits), moves);
    for (const Move& move : moves) {
      if (pack(move.after) != visited[way[i + 1]].bits) continue;
      text += move_text(move) + "\n";
      break;
    }
  }
  return text + move_text(violating);
}

}  // namespace

Packed pack(const State& s) {
  Packed packed = {};
  PackedBits bits(packed);
  for (const Rank status : s.status) bits.put(static_cast<unsigned>(status), 2);
  for_each_field(s, [&bits](std::uint8_t value, int width) {
    bits.room_for(width);
    bits.put(value, width);
  });
  return packed;
}

State unpack(const Packed& packed) {
  State s;
  Packed copy = packed;
  PackedBits bits(copy);
  for (Rank& status : s.status) {
    std::uint8_t value = 0;
    bits.get(value, 2);
    status = static_cast<Rank>(value);
  }
  for_each_field(s, [&bits](std::uint8_t& value, int width) {
    bits.room_for(width);
    bits.get(value, width);
  });
  return s;
}

const char* property_name(Property p) {
  switch (p) {
    case Property::kOverwrittenUnread:
      return "overwritten unread";
    case Property::kReadBeforeWritten:
      return "read before it was written";
    case Property::kWrongLive:
      return "wrong number of live rows";
    case Property::kWordRefused:
      return "a right word refused";
    case Property::kWrongSum:
      return "wrong sum";
    case Property::kStuck:
      return "a living rank waits for ever";
    case Property::kNotFinished:
      return "a rank reports without a reason";
    case Property::kNotReported:
      return "a rank finishes what it must report";
    case Property::kDeadNotNamed:
      return "the report does not name the dead rank";
  }
  return "?";
}

std::string move_text(const Move& m) {
  constexpr const char* kStepNames[kSteps] = {
      "stores ids",         "publishes ids",  "stores rows",       "publishes rows",
      "waits for ids",      "reads ids",      "waits for rows",    "reads the first row",
      "reads the last row", "stores answers", "publishes answers", "waits for answers",
      "sums answers"};
  constexpr const char* kPieceNames[kPieces] = {"ids", "rows", "answers"};
  const std::string arrival = fmt::format("from rank {} arrive at rank {}", m.rank, m.reader);
  switch (m.kind) {
    case MoveKind::kStep:
      return fmt::format("rank {} {}", m.rank, kStepNames[m.what]);
    case MoveKind::kTimeOut:
      return fmt::format("rank {} runs out of time", m.rank);
    case MoveKind::kAbortSeen:
      return fmt::format("rank {} sees a report", m.rank);
    case MoveKind::kDies:
      return fmt::format("rank {} dies", m.rank);
    case MoveKind::kRecover:
      return "the survivors go on";
    case MoveKind::kData:
      return fmt::format("{} {}", kPieceNames[m.what], arrival);
    case MoveKind::kWord:
      return fmt::format("word of {} {}", kPieceNames[m.what], arrival);
    case MoveKind::kAbort:
      return fmt::format("report {}", arrival);
  }
  return "?";
}

Exploration explore(const Protocol& protocol) {
  const Model model(protocol);
  Exploration result;
  Visited visited;
  visited.add(pack(model.start()), 0);
  std::vector<Move> moves;
  // States are appended while they are visited: that is the breadth-first order.
  for (std::uint32_t i = 0; i < visited.size() && !result.violation; ++i) {
    const State state = unpack(visited[i].bits);
    model.moves(state, moves);
    if (model.is_end(state, moves)) {
      ++result.ends;
      result.violation = model.judge_end(state);
      if (result.violation) {
        Move last;
        const std::uint32_t parent = visited[i].parent;
        model.moves(unpack(visited[parent].bits), moves);
        for (const Move& move : moves) {
          if (pack(move.after) == visited[i].bits) last = move;
        }
        result.trace = trace_to(model, visited, parent, last);
        break;
      }
    }
    for (const Move& move : moves) {
      ++result.transitions;
      if (move.violation) {
        result.violation = move.violation;
        result.trace = trace_to(model, visited, i, move);
        break;
      }
      visited.add(pack(move.after), i);
    }
  }
  result.states = static_cast<std::int64_t>(visited.size());
  return result;
}

}  // namespace moesaic::peer_model
