// "Did you mean": the known name with the fewest single-character edits from a given one. For error
// texts.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic {

// Insertions, deletions and replacements that turn `a` into `b` (Levenshtein). Names longer than 64
// characters are cut: they come from outside and the answer is only a hint.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  constexpr std::size_t kMaxLength = 64;
  a = a.substr(0, kMaxLength);
  b = b.substr(0, kMaxLength);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replace = diagonal + (a[i - 1] != b[j - 1] ? 1 : 0);
      diagonal = row[j];
      row[j] = std::min({replace, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// How far a known name is from what somebody wrote, in whatever case: first the names that contain
// it ("FP8" is meant as "fp8-block" rather than as "f32"), then by edits.
struct NameDistance {
  bool unrelated = true;  // does not contain it
  std::size_t edits = 0;
  bool operator<(const NameDistance& other) const {
    return unrelated != other.unrelated ? !unrelated : edits < other.edits;
  }
};

inline NameDistance name_distance(std::string_view name, std::string_view known) {
  const auto folded = [](std::string_view text) {
    std::string out(text);
    for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    return out;
  };
  constexpr std::size_t kMinPart = 2;
  const std::string wanted = folded(name), candidate = folded(known);
  const bool part = wanted.size() >= kMinPart && candidate.find(wanted) != std::string::npos;
  return {!part, edit_distance(wanted, candidate)};
}

// The first of the nearest names; empty when there are none.
inline std::string_view nearest_name(std::string_view name,
                                     std::span<const std::string_view> known) {
  std::string_view best;
  NameDistance best_distance;
  for (const std::string_view candidate : known) {
    const NameDistance distance = name_distance(name, candidate);
    if (best.empty() || distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace moesaic
