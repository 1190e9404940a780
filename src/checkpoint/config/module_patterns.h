// Patterns for module names, from untrusted files: bounded in size and time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

inline constexpr std::size_t kMaxPatternBytes = 512;

// Whether the regular expression matches the name from its start (not necessarily to its end), as
// Python's re.match, in the syntax that both languages share and with \A and \Z: no back-references
// or look-behind. kUnsupported for an escape that means something else or nothing (\G, \c), and for a
// pattern that is too long, repeats too much (the compiled form is bounded too), malformed or too
// complex. `field` begins the message.
Result<bool> regex_matches(std::string_view field, const std::string& pattern,
                           std::string_view name);

// The same of a pattern that was tried once: false where regex_matches refuses. Quick where the name
// has not all of the pattern's texts.
bool regex_hits(const std::string& pattern, std::string_view name);

// Texts that are in every name that the pattern matches ("layers.3." of ".*layers\\.3\\..*"); some of
// them, or none.
std::vector<std::string> texts_of_regex(std::string_view pattern);
std::vector<std::string> texts_of_glob(std::string_view pattern);

// What a match costs at most, in steps: bytes of the pattern times its counts in braces.
std::uint64_t regex_states(std::string_view pattern);

// Shell pattern (*, ?, [..]) for the whole name.
bool glob_matches(const std::string& pattern, const std::string& name);

}  // namespace moesaic::checkpoint
