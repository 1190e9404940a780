// Numbers that JSON lacks and Python writes into config.json all the same: Infinity, -Infinity and
// NaN (time_step_limit of Nemotron-H). Readers of JSON are shown texts with a mark in their place.
#pragma once

#include <string>
#include <string_view>

namespace moesaic::checkpoint {

// Infinity becomes "__float__ Infinity" where a value stands; the rest of the text stays as it is,
// valid JSON or not. May throw std::bad_alloc.
std::string quote_python_constants(std::string_view json);
// The other way, for what is written.
std::string unquote_python_constants(std::string_view json);

}  // namespace moesaic::checkpoint
