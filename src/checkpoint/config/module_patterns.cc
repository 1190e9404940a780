#include "checkpoint/config/module_patterns.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <map>
#include <memory>
#include <mutex>
#include <regex>

#include "checkpoint/container/names.h"

namespace moesaic {
namespace {

// libstdc++'s default engine backtracks: exponential time and deep recursion on hostile patterns.
// Its breadth-first engine needs time proportional to pattern times name and refuses
// back-references.
#ifdef __GLIBCXX__
const auto kSyntax = std::regex_constants::ECMAScript | std::regex_constants::__polynomial;
#else
const auto kSyntax = std::regex_constants::ECMAScript;
#endif

constexpr std::size_t kMaxCached = 256;

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

}  // namespace moesaic
