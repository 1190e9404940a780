#include "checkpoint/config/python_constants.h"

#include <array>
#include <cstddef>

namespace moesaic::checkpoint {
namespace {

constexpr std::string_view kMark = "\"__float__ ";
constexpr std::array<std::string_view, 3> kConstants = {"-Infinity", "Infinity", "NaN"};

bool in_word(char c) {
  return c == '_' || c == '-' || c == '+' || c == '.' || (c >= '0' && c <= '9') ||
         (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

// The constant that is a word of its own at `at`; empty: none.
std::string_view constant_at(std::string_view text, std::size_t at) {
  if (at > 0 && in_word(text[at - 1])) return {};
  for (const std::string_view constant : kConstants) {
    const std::size_t end = at + constant.size();
    if (text.substr(at, constant.size()) == constant && (end >= text.size() || !in_word(text[end])))
      return constant;
  }
  return {};
}

}  // namespace

std::string quote_python_constants(std::string_view json) {
  std::string quoted;
  quoted.reserve(json.size());
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const std::string_view constant = in_string ? std::string_view() : constant_at(json, i);
    if (!constant.empty()) {
      quoted.append(kMark).append(constant).append("\"");
      i += constant.size() - 1;
      continue;
    }
    quoted += json[i];
    if (json[i] == '"') in_string = !in_string;
    if (in_string && json[i] == '\\' && i + 1 < json.size()) quoted += json[++i];
  }
  return quoted;
}

std::string unquote_python_constants(std::string_view json) {
  std::string plain;
  plain.reserve(json.size());
  for (std::size_t i = 0; i < json.size();) {
    std::size_t taken = 1;
    const bool marked = json.substr(i, kMark.size()) == kMark && (i == 0 || json[i - 1] != '\\');
    for (const std::string_view constant : kConstants) {
      const std::string_view rest = marked ? json.substr(i + kMark.size()) : std::string_view();
      if (!rest.starts_with(constant) || rest.substr(constant.size(), 1) != "\"") continue;
      plain.append(constant);
      taken = kMark.size() + constant.size() + 1;
    }
    if (taken == 1) plain += json[i];
    i += taken;
  }
  return plain;
}

}  // namespace moesaic::checkpoint
