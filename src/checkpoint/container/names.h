// Names that come from files, made safe and helpful in messages.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace moesaic::checkpoint {

// Text for a terminal: what it would obey (C0, DEL, C1, marks that turn the direction of writing
// round, line and paragraph separators) and bytes that are not UTF-8 become \xNN. O(n).
//   keep_newlines  for text of several lines that is otherwise the caller's own
std::string escape_controls(std::string_view text, bool keep_newlines = false);

// The text in double quotes for a message: control and non-UTF-8 bytes as \xNN, cut after 160 bytes
// (an attacker's name may be 100 MB long).
std::string quote_name(std::string_view name);

// nearest_name of core among the first 4096 candidates (an attacker's file may list millions), or
// empty when even the nearest is further away than half of the name.
std::string similar_name(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace moesaic::checkpoint
