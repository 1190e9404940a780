#include "checkpoint/config/expert_entries.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "checkpoint/config/module_patterns.h"

namespace moesaic::checkpoint {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Whether `<experts>.<e>.<projection>` can have the text in it for any e.
bool can_be_in_experts(std::string_view text, std::string_view experts,
                       std::span<const std::string_view> projections) {
  const std::string before = fmt::format("{}.", experts);
  if (before.find(text) != std::string::npos) return true;
  for (const std::string_view projection : projections) {
    const std::string behind = fmt::format(".{}", projection);
    if (behind.find(text) != std::string::npos) return true;
    // Over the number, or a part of it: what is in front of it and behind it must fit.
    for (std::size_t begin = 0; begin < text.size(); ++begin) {
      if (!is_digit(text[begin]) || !before.ends_with(text.substr(0, begin))) continue;
      for (std::size_t end = begin; end < text.size() && is_digit(text[end]);) {
        ++end;
        if (behind.starts_with(text.substr(end))) return true;
      }
    }
  }
  return false;
}

bool can_match_experts(const std::vector<std::string>& texts, std::string_view experts,
                       std::span<const std::string_view> projections) {
  return std::all_of(texts.begin(), texts.end(), [&](const std::string& text) {
    return can_be_in_experts(text, experts, projections);
  });
}

// Steps that it takes at most to match an entry, where a step is about one comparison of bytes.
std::uint64_t regex_cost(std::string_view pattern) {
  return 16 * regex_states(pattern);  // most characters of a name leave a few states alive
}
std::uint64_t entry_cost(NameRule rule, std::string_view entry) {
  if (rule == NameRule::kName) return 1;
  const bool regexes = rule == NameRule::kExactOrRegex || rule == NameRule::kTextOrRegex;
  if (regexes && entry.starts_with("re:")) return regex_cost(entry.substr(3));
  return rule == NameRule::kExactOrRegex ? 1 : entry.size() + 1;
}
}  // namespace

QuantConfig narrowed(const QuantConfig& quant, std::string_view experts,
                     std::span<const std::string_view> projections) {
  const auto may_match = [&](NameRule rule, const std::string& entry) {
    if (rule == NameRule::kName) return entry.starts_with(experts) || experts.starts_with(entry);
    if (rule == NameRule::kGlob)
      return can_match_experts(texts_of_glob(entry), experts, projections);
    if (rule == NameRule::kParts) return true;
    if (rule == NameRule::kTextOrRegex && !entry.starts_with("re:"))
      return can_be_in_experts(entry, experts, projections);
    if (!entry.starts_with("re:")) return entry == "Linear" || entry.starts_with(experts);
    return can_match_experts(texts_of_regex(entry.substr(3)), experts, projections);
  };
  const auto copy = [&](NameRule rule, const std::vector<std::string>& from,
                        std::vector<std::string>* to) {
    std::copy_if(from.begin(), from.end(), std::back_inserter(*to),
                 [&](const std::string& entry) { return may_match(rule, entry); });
  };
  QuantConfig narrow;
  narrow.linear = quant.linear;
  narrow.rule = quant.rule;
  narrow.only = quant.only;
  copy(quant.rule, quant.skips, &narrow.skips);
  for (const QuantGroup& group : quant.groups) {
    narrow.groups.push_back({group.name, group.format, {}, group.unread});
    copy(target_rule(quant.rule), group.targets, &narrow.groups.back().targets);
  }
  std::copy_if(quant.overrides.begin(), quant.overrides.end(), std::back_inserter(narrow.overrides),
               [&](const QuantOverride& entry) {
                 return can_match_experts(texts_of_regex(entry.pattern), experts, projections);
               });
  return narrow;
}

std::uint64_t entries_cost(const QuantConfig& quant) {
  std::uint64_t cost = 0;
  for (const std::string& entry : quant.skips) cost += entry_cost(quant.rule, entry);
  for (const std::string& entry : quant.only) cost += entry.size() + 1;
  for (const QuantGroup& group : quant.groups) {
    for (const std::string& target : group.targets)
      cost += entry_cost(target_rule(quant.rule), target);
  }
  for (const QuantOverride& entry : quant.overrides) cost += regex_cost(entry.pattern);
  for (const QuantPart& part : quant.parts) cost += part.modules.size() + entries_cost(part.quant);
  return cost;
}

}  // namespace moesaic::checkpoint
