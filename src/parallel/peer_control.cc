#include "parallel/peer_control.h"

#include <fmt/format.h>

#include <array>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>

#include "core/checked.h"
#include "core/refusal.h"

namespace moesaic::parallel {

namespace {

constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

struct ShapeField {
  std::string_view name;
  std::int64_t value;
  std::int64_t most;
  std::string_view why;
};

Status check_field(const ShapeField& f) {
  if (f.value < 1) {
    return invalid(fmt::format("peer window: {} = {}, need at least 1", f.name, f.value));
  }
  if (f.value > f.most) {
    return {StatusCode::kLimitExceeded, fmt::format("peer window: {} = {}, need at most {}: {}",
                                                    f.name, f.value, f.most, f.why)};
  }
  return {};
}

std::optional<std::int64_t> whole_lines(std::optional<std::int64_t> bytes) {
  if (bytes) bytes = checked_add(*bytes, kPeerLine - 1);
  if (bytes) bytes = *bytes / kPeerLine * kPeerLine;
  return bytes;
}

// factor * factor * ..., or nothing.
std::optional<std::int64_t> product(std::initializer_list<std::int64_t> factors) {
  std::optional<std::int64_t> result = 1;
  for (const std::int64_t factor : factors) {
    if (result) result = checked_mul(*result, factor);
  }
  return result;
}

// Lays one piece behind the others.
Status append(std::int64_t& end, std::int64_t& begin, std::string_view piece,
              std::optional<std::int64_t> bytes) {
  begin = end;
  if (bytes) bytes = checked_add(end, *bytes);
  if (!bytes) {
    return {StatusCode::kLimitExceeded,
            fmt::format("peer window: {} end beyond 2^63 - 1 bytes", piece)};
  }
  end = *bytes;
  return {};
}

}  // namespace

Result<PeerLayout> make_peer_layout(const PeerShape& shape) {
  const std::array<ShapeField, 5> fields = {{
      {"ranks", shape.ranks, kPeerMaxRanks, "the mask of ranks is one line of bits"},
      {"tokens", shape.tokens, kPeerMaxLive, "a word has 20 bits for them"},
      {"top_k", shape.top_k, kNoLimit, ""},
      {"row_bytes", shape.row_bytes, kNoLimit, ""},
      {"answer_bytes", shape.answer_bytes, kNoLimit, ""},
  }};
  for (const ShapeField& field : fields) {
    if (Status s = check_field(field); !s.ok()) return s;
  }
  if (shape.scale_bytes < 0) {
    return invalid(
        fmt::format("peer window: scale_bytes = {}, need at least 0", shape.scale_bytes));
  }
  const auto slots = whole_lines(product({shape.tokens, shape.top_k, 4}));
  const auto row = whole_lines(shape.row_bytes), scale = whole_lines(shape.scale_bytes);
  const auto answer = whole_lines(shape.answer_bytes);
  // Nothing of a product that overflows is used: 0 only keeps the arithmetic going until the piece
  // that needs it is refused.
  PeerLayout layout;
  layout.shape = shape;
  layout.slots_pitch = slots.value_or(0);
  layout.row_pitch = row.value_or(0);
  layout.scale_pitch = scale.value_or(0);
  layout.answer_pitch = answer.value_or(0);
  const auto if_known = [](const std::optional<std::int64_t>& pitch,
                           std::initializer_list<std::int64_t> factors) {
    return pitch ? product(factors) : std::nullopt;
  };

  std::int64_t words = 0;
  std::int64_t& end = layout.bytes;
  const std::int64_t answer_rows = shape.form == PeerAnswerForm::kSlot ? shape.top_k : shape.ranks;
  struct Piece {
    std::string_view name;
    std::int64_t& begin;
    std::optional<std::int64_t> bytes;
  };
  const std::array<Piece, 7> pieces = {{
      {"words", words, product({kPeerKinds, shape.ranks, kPeerLine})},
      {"own lines", layout.own_lines, kPeerOwnLines * kPeerLine},
      {"ids", layout.ids, if_known(slots, {shape.ranks, layout.slots_pitch})},
      {"weights", layout.weights, if_known(slots, {shape.ranks, layout.slots_pitch})},
      {"rows", layout.rows, if_known(row, {shape.ranks, shape.tokens, layout.row_pitch})},
      {"scales", layout.scales, if_known(scale, {shape.ranks, shape.tokens, layout.scale_pitch})},
      {"answers", layout.answers,
       if_known(answer, {answer_rows, shape.tokens, layout.answer_pitch})},
  }};
  for (const Piece& piece : pieces) {
    if (Status s = append(end, piece.begin, piece.name, piece.bytes); !s.ok()) return s;
  }
  return layout;
}

}  // namespace moesaic::parallel
