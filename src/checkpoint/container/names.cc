#include "checkpoint/container/names.h"

#include <algorithm>
#include <cstdint>

#include "checkpoint/container/json_strict.h"
#include "core/fault.h"
#include "core/nearest_name.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::size_t kMaxQuotedBytes = 160;
constexpr std::size_t kMaxCandidates = 4096;

// Length of the control character that valid UTF-8 begins with; 0 when it begins with another.
std::size_t control_bytes(std::string_view text) {
  const auto at = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  if (at(0) < 0x20 || at(0) == 0x7F) return 1;
  if (at(0) == 0xC2 && at(1) < 0xA0) return 2;   // U+0080 .. U+009F
  if (at(0) == 0xD8 && at(1) == 0x9C) return 2;  // U+061C, a mark of direction
  if (at(0) != 0xE2) return 0;
  // U+200E, U+200F, U+2028 .. U+202E; U+2066 .. U+2069.
  const bool general =
      at(1) == 0x80 && ((at(2) >= 0x8E && at(2) <= 0x8F) || (at(2) >= 0xA8 && at(2) <= 0xAE));
  const bool isolates = at(1) == 0x81 && at(2) >= 0xA6 && at(2) <= 0xA9;
  return general || isolates ? 3 : 0;
}

void append_hex(char c, std::string* out) {
  constexpr char kHex[] = "0123456789abcdef";
  const auto byte = static_cast<unsigned char>(c);
  *out += "\\x";
  *out += kHex[byte >> 4];
  *out += kHex[byte & 15];
}

}  // namespace

std::string escape_controls(std::string_view text, bool keep_newlines) {
  if (MOESAIC_FAULT(names_pass_controls)) return std::string(text);
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t valid = first_invalid_utf8(text);
    for (std::size_t i = 0; i < valid;) {
      const std::size_t bytes = control_bytes(text.substr(i, valid - i));
      const bool kept = bytes == 0 || (keep_newlines && text[i] == '\n');
      if (kept) {
        out += text[i++];
        continue;
      }
      for (std::size_t end = i + bytes; i < end; ++i) append_hex(text[i], &out);
    }
    if (valid == text.size()) break;
    append_hex(text[valid], &out);
    text.remove_prefix(valid + 1);
  }
  return out;
}

std::string quote_name(std::string_view name) {
  std::size_t shown = std::min(name.size(), kMaxQuotedBytes);
  // Do not cut a multi-byte character in two.
  while (shown < name.size() && shown > 0 &&
         (static_cast<unsigned char>(name[shown]) & 0xC0) == 0x80) {
    --shown;
  }
  std::string out = "\"" + escape_controls(name.substr(0, shown)) + "\"";
  if (shown < name.size()) out += "... (" + std::to_string(name.size()) + " bytes)";
  return out;
}

std::string similar_name(std::string_view name, std::span<const std::string_view> candidates) {
  const std::string_view nearest =
      nearest_name(name, candidates.first(std::min(candidates.size(), kMaxCandidates)));
  return std::string(edit_distance(name, nearest) <= name.size() / 2 ? nearest : "");
}

}  // namespace moesaic::checkpoint
