#include "checkpoint/config/module_patterns.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <mutex>
#include <optional>
#include <regex>
#include <unordered_map>

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
constexpr std::uint64_t kMaxStates = 16384, kMaxCachedStates = 32 * kMaxStates;

// Classes of characters and controls, which mean the same in Python and in ECMAScript, and numbers.
constexpr std::string_view kLetterEscapes = "dDwWsSbBnrtfvxu0123456789";

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

// What ECMAScript reads otherwise than Python, which the patterns are written for; empty: nothing.
// Python's ends of the name have other spellings there: see as_ecmascript.
std::string foreign_part(std::string_view pattern) {
  const auto at = [&](std::size_t i) { return i < pattern.size() ? pattern[i] : '\0'; };
  bool in_set = false;
  int counts = 0;  // in a row, among them the ? of "as few as possible"
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (static_cast<unsigned char>(c) > 127) return "has a character outside ASCII";
    if (c == '\\') {
      const char letter = at(++i);
      const bool end = letter == 'A' || letter == 'Z';
      if (is_word(letter) && !end && kLetterEscapes.find(letter) == kLetterEscapes.npos) {
        return fmt::format("has the escape \\{}", letter);
      }
    } else if (in_set) {
      if (c == '[' && (at(i + 1) == ':' || at(i + 1) == '.' || at(i + 1) == '=')) {
        return fmt::format("has [{} in a set", at(i + 1));
      }
      in_set = c != ']';
    } else if (c == '[') {
      in_set = true;
      if (at(i + 1) == '^') ++i;
      if (at(i + 1) == ']') return "has a set that begins with ]";
    } else if (c == '*' || c == '+' || c == '?' || c == '{') {
      if (++counts > 2 || (counts == 2 && c != '?')) return "has two counts in a row";
      if (c == '{') i = std::min(pattern.find('}', i), pattern.size());
      continue;
    } else if (c == '(' && at(i + 1) == '?') {
      ++i;
    }
    counts = 0;
  }
  return {};
}

// The pattern with ^ and $ for Python's \A and \Z: names have no lines.
std::string as_ecmascript(std::string_view pattern) {
  std::string text;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const bool escape = pattern[i] == '\\' && i + 1 < pattern.size();
    const bool end = escape && (pattern[i + 1] == 'A' || pattern[i + 1] == 'Z') &&
                     !MOESAIC_FAULT(checkpoint_python_ends_are_letters);
    if (end) {
      text += pattern[++i] == 'A' ? '^' : '$';
      continue;
    }
    text += pattern[i];
    if (escape) text += pattern[++i];
  }
  return text;
}

// Compiled patterns: the same ones are asked about thousands of modules. No regex: malformed.
struct Compiled {
  std::optional<std::regex> regex;
  std::vector<std::string> texts;
};
std::shared_ptr<const Compiled> compiled(const std::string& pattern) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const Compiled>> cache;
  static std::uint64_t cached_states = 0;
  const std::lock_guard lock(mutex);
  const auto it = cache.find(pattern);
  if (it != cache.end()) return it->second;
  auto made = std::make_shared<Compiled>();
  try {
    made->regex.emplace(as_ecmascript(pattern), kSyntax);
  } catch (const std::regex_error&) {
  }
  made->texts = texts_of_regex(as_ecmascript(pattern));
  const std::uint64_t states = regex_states(pattern);
  if (cached_states + states > kMaxCachedStates) {
    cache.clear();
    cached_states = 0;
  }
  cached_states += states;
  cache.emplace(pattern, made);
  return made;
}

// The end of the class of characters that begins at `at`; npos: not a simple one.
std::size_t end_of_class(std::string_view pattern, std::size_t at) {
  const std::size_t first = at + (pattern.substr(at + 1).starts_with('^') ? 2 : 1);
  const std::size_t end = pattern.find_first_of("]\\[", first);
  return end != pattern.npos && end > first && pattern[end] == ']' ? end : pattern.npos;
}

// The end of the group that begins at `at`; npos: not a simple one.
std::size_t end_of_group(std::string_view pattern, std::size_t at) {
  int depth = 0;
  for (std::size_t i = at; i < pattern.size(); ++i) {
    if (pattern[i] == '\\')
      ++i;
    else if (pattern[i] == '[')
      i = end_of_class(pattern, i);
    else if (pattern[i] == '(')
      ++depth;
    else if (pattern[i] == ')' && --depth == 0)
      return i;
    if (i == pattern.npos) break;
  }
  return pattern.npos;
}

}  // namespace

std::vector<std::string> texts_of_regex(std::string_view pattern) {
  std::vector<std::string> texts;
  std::string run;
  const auto flush = [&] {
    if (!run.empty()) texts.push_back(run);
    run.clear();
  };
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    char c = pattern[i];
    bool literal = true;
    if (c == '\\') {
      if (++i == pattern.size()) return {};
      c = pattern[i];
      literal = std::isalnum(static_cast<unsigned char>(c)) == 0;
      // Classes are any text; other letters begin codes of characters.
      if (!literal && std::string_view("dDwWsSbB").find(c) == std::string_view::npos) return {};
    } else if (c == '[' || c == '(') {
      literal = false;
      i = c == '[' ? end_of_class(pattern, i) : end_of_group(pattern, i);
      if (i == pattern.npos) return {};
    } else if (c == '{') {
      literal = false;
      i = pattern.find('}', i);
      if (i == pattern.npos) return {};
    } else if (std::string_view("|)]}").find(c) != std::string_view::npos) {
      return {};
    } else if (std::string_view(".^$*+?").find(c) != std::string_view::npos) {
      literal = false;
    }
    if (!literal) {
      flush();
      continue;
    }
    const char next = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == '*' || next == '?' || next == '{') {
      flush();  // without this one, which may be left out
    } else {
      run += c;
    }
  }
  flush();
  return texts;
}

std::vector<std::string> texts_of_glob(std::string_view pattern) {
  std::vector<std::string> texts;
  // Behind a class or an escape nothing is known.
  pattern = pattern.substr(0, pattern.find_first_of("[\\"));
  while (!pattern.empty()) {
    const std::size_t end = std::min(pattern.find_first_of("*?"), pattern.size());
    if (end > 0) texts.emplace_back(pattern.substr(0, end));
    pattern.remove_prefix(std::min(end + 1, pattern.size()));
  }
  return texts;
}

// At least as many as the states of the pattern: its bytes times all counts in braces, as if they
// were nested.
std::uint64_t regex_states(std::string_view pattern) {
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

Result<bool> regex_matches(std::string_view field, const std::string& pattern,
                           std::string_view name) {
  const auto refuse = [&](std::string_view why) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: regular expression {} {}", field, quote_name(pattern), why));
  };
  if (pattern.size() > kMaxPatternBytes) {
    return refuse(fmt::format("has {} bytes, need at most {}", pattern.size(), kMaxPatternBytes));
  }
  if (regex_states(pattern) > kMaxStates && !MOESAIC_FAULT(checkpoint_regex_any_count)) {
    return refuse(
        fmt::format("repeats too much, need at most {} for its bytes times its counts "
                    "in braces",
                    kMaxStates));
  }
  if (const std::string part = foreign_part(pattern);
      !part.empty() && !MOESAIC_FAULT(checkpoint_foreign_parts_are_read)) {
    return refuse(part + ", which is not supported");
  }
  const std::shared_ptr<const Compiled> made = compiled(pattern);
  if (!made->regex) return refuse("is malformed or not supported");
  try {
    return std::regex_search(name.begin(), name.end(), *made->regex,
                             std::regex_constants::match_continuous);
  } catch (const std::regex_error&) {
    return refuse("is too complex");
  }
}

bool regex_hits(const std::string& pattern, std::string_view name) {
  if (pattern.size() <= kMaxPatternBytes && regex_states(pattern) <= kMaxStates) {
    for (const std::string& text : compiled(pattern)->texts) {
      if (name.find(text) == name.npos) return false;
    }
  }
  const Result<bool> hit = regex_matches("", pattern, name);
  return hit.ok() && *hit;
}

bool glob_matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

}  // namespace moesaic::checkpoint
