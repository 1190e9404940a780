// Names that come from files, made safe and helpful in messages.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace moesaic {

// The text in double quotes for a message: control and non-UTF-8 bytes as \xNN, cut after 160 bytes
// (an attacker's name may be 100 MB long).
std::string quote_name(std::string_view name);

// The candidate with the smallest edit distance to `name`, or empty when none is closer than half
// of the name's length. Ties go to the first. Looks at the first 4096 candidates and 256 bytes.
std::string nearest_name(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace moesaic
