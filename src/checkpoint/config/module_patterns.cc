#include "checkpoint/config/module_patterns.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <regex>

#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// libstdc++'s default engine backtracks: exponential time and deep recursion on hostile patterns.
// Its breadth-first engine needs time proportional to pattern times name and refuses
// back-references.
#ifdef __GLIBCXX__
const auto kSyntax = std::regex_constants::ECMAScript | std::regex_constants::__polynomial;
#else
const auto kSyntax = std::regex_constants::ECMAScript;
#endif

// A compiled pattern has a state of some 50 bytes for each byte of the pattern, as often as it is
// repeated: at most about 1 MB, and 32 MB of all that are kept.
constexpr std::size_t kMaxCached = 32;
constexpr std::uint64_t kMaxStates = 16384;

// At least as many as the states of the pattern: its bytes times all counts in braces, as if they
// were nested.
std::uint64_t estimated_states(std::string_view pattern) {
  std::uint64_t states = pattern.size();
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '{') continue;
    std::uint64_t largest = 1, count = 0;
    for (++i; i < pattern.size() && pattern[i] != '}'; ++i) {
      const bool digit = pattern[i] >= '0' && pattern[i] <= '9';
      count = digit ? std::min<std::uint64_t>(
                          count * 10 + static_cast<std::uint64_t>(pattern[i] - '0'), kMaxStates)
                    : 0;
      largest = std::max(largest, count);
    }
    states = std::min(states * largest, kMaxStates + 1);
  }
  return states;
}

// Compiled patterns: the same few are asked about thousands of modules. Null: malformed.
std::shared_ptr<const std::regex> compiled(const std::string& pattern) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const std::regex>> cache;
  const std::lock_guard lock(mutex);
  const auto it = cache.find(pattern);
  if (it != cache.end()) return it->second;
  std::shared_ptr<const std::regex> made;
  try {
    made = std::make_shared<const std::regex>(pattern, kSyntax);
  } catch (const std::regex_error&) {
  }
  if (cache.size() >= kMaxCached) cache.clear();
  cache.emplace(pattern, made);
  return made;
}

}  // namespace

Result<bool> regex_matches(std::string_view field, const std::string& pattern,
                           std::string_view name) {
  const auto refuse = [&](std::string_view why) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: regular expression {} {}", field, quote_name(pattern), why));
  };
  if (pattern.size() > kMaxPatternBytes) {
    return refuse(fmt::format("has {} bytes, need at most {}", pattern.size(), kMaxPatternBytes));
  }
  if (estimated_states(pattern) > kMaxStates && !MOESAIC_FAULT(checkpoint_regex_any_count)) {
    return refuse(
        fmt::format("repeats too much, need at most {} for its bytes times its counts "
                    "in braces",
                    kMaxStates));
  }
  const std::shared_ptr<const std::regex> regex = compiled(pattern);
  if (!regex) return refuse("is malformed or not supported");
  try {
    return std::regex_search(name.begin(), name.end(), *regex,
                             std::regex_constants::match_continuous);
  } catch (const std::regex_error&) {
    return refuse("is too complex");
  }
}

bool glob_matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

}  // namespace moesaic::checkpoint
