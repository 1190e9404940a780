// What ranks that write into each other's memory agree on: where the pieces of a peer window lie,
// and the words that say what has been written. Shared by host and device; nothing here touches
// memory. Source: docs/design/peer-windows.md.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/fault.h"
#include "core/host_device.h"
#include "moesaic/status.h"

// Fault points of functions that kernels call too: kernels have their own (cuda/fault.cuh).
#ifdef __CUDA_ARCH__
#define MOESAIC_ON_HOST(condition) false
#else
#define MOESAIC_ON_HOST(condition) (condition)
#endif

namespace moesaic::parallel {

// ---- Words ----

// A word in memory: epoch (32 bits, highest), live rows (20), signature (12). A writer never resets
// it; a reader compares its epoch. Epochs count calls and wrap.
struct PeerWord {
  std::uint32_t epoch = 0;
  std::uint32_t live = 0;       // rows that the writer sends in this call; < 2^20
  std::uint32_t signature = 0;  // of the call, see peer_signature; < 2^12
};
inline constexpr int kPeerLiveBits = 20, kPeerSignatureBits = 12;
inline constexpr std::uint32_t kPeerMaxLive = (1U << kPeerLiveBits) - 1;
inline constexpr std::uint32_t kPeerSignatureMask = (1U << kPeerSignatureBits) - 1;

// live and signature must be in range: higher bits would change the fields above them.
MOESAIC_HOST_DEVICE constexpr std::uint64_t pack_peer_word(const PeerWord& word) {
  std::uint64_t live = word.live;
  if (live > 1 && MOESAIC_ON_HOST(MOESAIC_FAULT(peer_word_live_is_one_less))) --live;
  return (std::uint64_t{word.epoch} << (kPeerLiveBits + kPeerSignatureBits)) |
         (live << kPeerSignatureBits) | word.signature;
}
MOESAIC_HOST_DEVICE constexpr PeerWord unpack_peer_word(std::uint64_t bits) {
  return {static_cast<std::uint32_t>(bits >> (kPeerLiveBits + kPeerSignatureBits)),
          static_cast<std::uint32_t>(bits >> kPeerSignatureBits) & kPeerMaxLive,
          static_cast<std::uint32_t>(bits) & kPeerSignatureMask};
}

// How many calls `a` is after `b`; right while they are less than 2^31 calls apart.
MOESAIC_HOST_DEVICE constexpr std::int32_t epoch_difference(std::uint32_t a, std::uint32_t b) {
  // Unsigned comparison would be right until the counter wraps.
  if (a < b && MOESAIC_ON_HOST(MOESAIC_FAULT(peer_epoch_difference_saturates))) return -1;
  return static_cast<std::int32_t>(a - b);
}

// 12 bits of a hash of what all ranks must agree on in a call (shape, dtypes, form, masked ranks).
MOESAIC_HOST_DEVICE constexpr std::uint32_t peer_signature(std::uint64_t hash) {
  std::uint64_t folded = 0;
  for (int shift = 0; shift < 64; shift += kPeerSignatureBits) folded ^= hash >> shift;
  return static_cast<std::uint32_t>(folded) & kPeerSignatureMask;
}

// What a reader knows about the word that it waits for.
struct PeerExpected {
  std::uint32_t epoch = 0;     // of this call
  std::uint32_t previous = 0;  // the word had this epoch, or a later one, before this call
  std::uint32_t signature = 0;
  std::uint32_t capacity = 0;  // rows that a rank may send
};

enum class PeerVerdict : std::uint8_t {
  kNotYet,       // go on waiting
  kReady,        // what the word stands for may be read
  kOtherCall,    // the writer is in this call by count, but in another one by signature
  kTooManyRows,  // more rows than have a slot
  kStale,        // older than what was there already: the memory is not what it was
  kFuture,       // the writer is ahead, which waiting for each other excludes
};

// Of the words that one reader waits for in one call, each is judged until it is no longer kNotYet.
// Only kReady allows to read, and then `live` rows; all but the first two end the call on all
// ranks.
MOESAIC_HOST_DEVICE constexpr PeerVerdict judge_peer_word(const PeerWord& word,
                                                          const PeerExpected& expected) {
  const std::int32_t ahead = epoch_difference(word.epoch, expected.epoch);
  if (ahead > 0) return PeerVerdict::kFuture;
  if (ahead < 0) {
    if (epoch_difference(word.epoch, expected.previous) < 0) return PeerVerdict::kStale;
    if (!MOESAIC_ON_HOST(MOESAIC_FAULT(peer_word_of_previous_call_is_ready)))
      return PeerVerdict::kNotYet;
  }
  if (word.signature != expected.signature &&
      !MOESAIC_ON_HOST(MOESAIC_FAULT(peer_word_signature_ignored))) {
    return PeerVerdict::kOtherCall;
  }
  if (word.live > expected.capacity &&
      !MOESAIC_ON_HOST(MOESAIC_FAULT(peer_word_capacity_ignored))) {
    return PeerVerdict::kTooManyRows;
  }
  return PeerVerdict::kReady;
}

// ---- Reports ----

// Why a call ended on all ranks. A line that one rank writes into every window, its own too, `code`
// last and with release; 0: no report. There is a line for each rank that reports: a line for all
// could not hold the names of one report and the code of another.
enum class PeerFailure : std::uint32_t {
  kNone,
  kLate,          // words of `missing` did not arrive in time
  kBadWord,       // words of `missing` are there and not right: `verdict` of the first
  kRefused,       // `reporter` could not take part; its own error says why
  kTooManyPairs,  // `reporter` has `pairs` pairs of a row and an expert, and room for `capacity`
};
struct PeerReport {
  std::uint64_t code = 0;     // PeerFailure
  std::uint64_t missing = 0;  // a bit for each rank
  std::uint32_t reporter = 0;
  std::uint32_t epoch = 0;
  std::uint32_t kind = 0;     // PeerKind of the words that were waited for
  std::uint32_t verdict = 0;  // PeerVerdict
  std::uint32_t pairs = 0, capacity = 0;
};
// A report has a bit for each rank.
inline constexpr int kPeerReportRanks = 64;

// ---- Layout ----

// Every piece, and in it the part of every writer, begins on its own line.
inline constexpr std::int64_t kPeerLine = 128;
// The mask of ranks is one line of bits.
inline constexpr std::int64_t kPeerMaxRanks = kPeerLine * 8;

// Which word: lines for each writer. `rows` and `answers` are words in copies, one behind the other:
// of a writer that works in parts each part may release its own copies as soon as it is done. What
// they stand for may be read when all copies are there.
inline constexpr int kPeerWordLines = 4;
inline constexpr int kPeerWordCopies = kPeerWordLines * 16;
enum class PeerKind : std::uint8_t { kMeta, kRows, kAnswers = kRows + kPeerWordLines, kRefuse = 9 };
inline constexpr int kPeerKinds = 10;
static_assert(static_cast<int>(PeerKind::kRefuse) ==
              static_cast<int>(PeerKind::kAnswers) + kPeerWordLines);
// Lines behind the words that belong to the window's own rank.
//   kAbort   the report that ended a call here; every later kernel returns at once
//   kLimits  how long a wait may last, in ns (8 bytes)
//   kEpoch   of the last call whose rows have all been read here (4 bytes)
//   kCall    the epoch of the last call whose rows have been sent from here (4 bytes)
enum class PeerOwnLine : std::uint8_t { kAbort, kMask, kLimits, kEpoch, kCall };
inline constexpr int kPeerOwnLines = 5;

enum class PeerAnswerForm : std::uint8_t {
  kPartial,  // [R][T]: of each answering rank one row for a token, its own experts' sum
  kSlot,     // [T][k]: the row of each slot's expert, whichever rank computed it
};

struct PeerShape {
  std::int64_t ranks = 0;         // R, 1 to kPeerMaxRanks
  std::int64_t tokens = 0;        // T, rows that a rank may send in a call, 1 to kPeerMaxLive
  std::int64_t top_k = 0;         // k
  std::int64_t row_bytes = 0;     // of a row that is sent, without its scales
  std::int64_t answer_bytes = 0;  // of a row that comes back
  PeerAnswerForm form = PeerAnswerForm::kPartial;
  std::int64_t scale_bytes = 0;  // of a row's scales; 0: it has none
};

// Byte offsets in a window, the same on all ranks; made by make_peer_layout, passed to kernels.
// Indices are not checked.
struct PeerLayout {
  PeerShape shape;
  // Bytes from a row to the next, whole lines.
  std::int64_t row_pitch = 0, scale_pitch = 0, answer_pitch = 0;
  std::int64_t slots_pitch = 0;  // ids, weights: bytes from a writer to the next
  // Where pieces begin.
  std::int64_t own_lines = 0, ids = 0, weights = 0, rows = 0, scales = 0, answers = 0;
  std::int64_t bytes = 0;  // of the whole window

  // The word of `kind` that rank `writer` writes; `copy` of kRows and kAnswers.
  MOESAIC_HOST_DEVICE constexpr std::int64_t word(PeerKind kind, std::int64_t writer,
                                                  int copy = 0) const {
    return ((static_cast<int>(kind) + copy / 16) * shape.ranks + writer) * kPeerLine +
           copy % 16 * 8;
  }
  MOESAIC_HOST_DEVICE constexpr std::int64_t own_line(PeerOwnLine line) const {
    return own_lines + static_cast<int>(line) * kPeerLine;
  }
  // Entry [source][token][0] of the tables [R][T][k] of 4-byte ids and weights.
  MOESAIC_HOST_DEVICE constexpr std::int64_t id(std::int64_t source, std::int64_t token) const {
    return ids + source * slots_pitch + token * shape.top_k * 4;
  }
  MOESAIC_HOST_DEVICE constexpr std::int64_t weight(std::int64_t source, std::int64_t token) const {
    return weights + source * slots_pitch + token * shape.top_k * 4;
  }
  // A row's slot is its number on the rank that sends it.
  MOESAIC_HOST_DEVICE constexpr std::int64_t row(std::int64_t source, std::int64_t token) const {
    if (source > 0 && MOESAIC_ON_HOST(MOESAIC_FAULT(peer_row_in_the_slot_of_another_rank)))
      --source;
    return rows + (source * shape.tokens + token) * row_pitch;
  }
  MOESAIC_HOST_DEVICE constexpr std::int64_t scale(std::int64_t source, std::int64_t token) const {
    return scales + (source * shape.tokens + token) * scale_pitch;
  }
  // kPartial: what rank `from` answers for this rank's row `token`.
  MOESAIC_HOST_DEVICE constexpr std::int64_t partial(std::int64_t from, std::int64_t token) const {
    return answers + (from * shape.tokens + token) * answer_pitch;
  }
  // kSlot: what comes back for slot `slot` of this rank's row `token`.
  MOESAIC_HOST_DEVICE constexpr std::int64_t slot(std::int64_t token, std::int64_t slot) const {
    return answers + (token * shape.top_k + slot) * answer_pitch;
  }
};
static_assert(std::is_trivially_copyable_v<PeerLayout>, "kernels take it by value");

// kInvalidArgument for a number below 1; kLimitExceeded for more ranks or tokens than a word or the
// mask can name (the text has the limit), and for pieces or windows of more than 2^63 - 1 bytes
// (the text names the piece).
Result<PeerLayout> make_peer_layout(const PeerShape& shape);

}  // namespace moesaic::parallel

#undef MOESAIC_ON_HOST
