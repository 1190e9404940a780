#include "checkpoint/names.h"

#include <algorithm>
#include <cstdint>

#include "checkpoint/json_strict.h"
#include "core/nearest_name.h"

namespace moesaic {
namespace {

constexpr std::size_t kMaxQuotedBytes = 160;
constexpr std::size_t kMaxCandidates = 4096;

}  // namespace

std::string quote_name(std::string_view name) {
  constexpr char kHex[] = "0123456789abcdef";
  std::size_t shown = std::min(name.size(), kMaxQuotedBytes);
  // Do not cut a multi-byte character in two.
  while (shown < name.size() && shown > 0 &&
         (static_cast<unsigned char>(name[shown]) & 0xC0) == 0x80) {
    --shown;
  }
  const std::string_view part = name.substr(0, shown);
  const bool utf8 = first_invalid_utf8(part) == part.size();
  std::string out = "\"";
  for (std::size_t i = 0; i < part.size(); ++i) {
    const auto c = static_cast<unsigned char>(part[i]);
    const auto next = i + 1 < part.size() ? static_cast<unsigned char>(part[i + 1]) : 0U;
    // Terminals act on C0, DEL and C1 (U+0080..U+009F, encoded C2 80..C2 9F) controls.
    const bool c1 = c == 0xC2 && next >= 0x80 && next <= 0x9F;
    if (c < 0x20 || c == 0x7F || (c >= 0x80 && !utf8) || c1) {
      out += "\\x";
      out += kHex[c >> 4];
      out += kHex[c & 15];
      if (c1) {
        out += "\\x";
        out += kHex[next >> 4];
        out += kHex[next & 15];
        ++i;
      }
    } else {
      out += part[i];
    }
  }
  out += "\"";
  if (shown < name.size()) out += "... (" + std::to_string(name.size()) + " bytes)";
  return out;
}

std::string similar_name(std::string_view name, std::span<const std::string_view> candidates) {
  const std::string_view nearest =
      nearest_name(name, candidates.first(std::min(candidates.size(), kMaxCandidates)));
  return std::string(edit_distance(name, nearest) <= name.size() / 2 ? nearest : "");
}

}  // namespace moesaic
