// Patterns for module names, from untrusted files: bounded in size and time.
#pragma once

#include <string>
#include <string_view>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

inline constexpr std::size_t kMaxPatternBytes = 512;

// Whether the regular expression matches the name from its start (not necessarily to its end), as
// Python's re.match, in the syntax that both languages share: no back-references or look-behind.
// kUnsupported for a pattern that is too long, repeats too much (the compiled form is bounded too),
// malformed or too complex. `field` begins the message.
Result<bool> regex_matches(std::string_view field, const std::string& pattern,
                           std::string_view name);

// Shell pattern (*, ?, [..]) for the whole name.
bool glob_matches(const std::string& pattern, const std::string& name);

}  // namespace moesaic::checkpoint
