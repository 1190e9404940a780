// Names that come from files, made safe and helpful in messages.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace moesaic {

// The text in double quotes for a message: control and non-UTF-8 bytes as \xNN, cut after 160 bytes
// (an attacker's name may be 100 MB long).
std::string quote_name(std::string_view name);

// nearest_name of core among the first 4096 candidates (an attacker's file may list millions), or
// empty when even the nearest is further away than half of the name.
std::string similar_name(std::string_view name, std::span<const std::string_view> candidates);

}  // namespace moesaic
