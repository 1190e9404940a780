#include "checkpoint/config/expert_entries.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string>
#include <vector>

#include "checkpoint/config/module_patterns.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// What is around the number in names of experts' projections.
struct ExpertNames {
  std::string before;
  std::vector<std::string> behind;

  ExpertNames(std::string_view experts, std::span<const std::string_view> projections)
      : before(fmt::format("{}.", experts)) {
    for (const std::string_view projection : projections) {
      behind.push_back(fmt::format(".{}", projection));
    }
  }
};

// Whether one can have the text in it.
bool can_be_in_experts(std::string_view text, const ExpertNames& names) {
  const std::string& before = names.before;
  if (before.find(text) != std::string::npos) return true;
  for (const std::string& behind : names.behind) {
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

bool can_match_experts(const std::vector<std::string>& texts, const ExpertNames& names) {
  return std::all_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return can_be_in_experts(text, names); });
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
  const ExpertNames names(experts, projections);
  const auto may_match = [&](NameRule rule, const std::string& entry) {
    if (rule == NameRule::kName) return entry.starts_with(experts) || experts.starts_with(entry);
    if (rule == NameRule::kGlob) return can_match_experts(texts_of_glob(entry), names);
    if (rule == NameRule::kParts) return true;
    if (rule == NameRule::kTextOrRegex && !entry.starts_with("re:"))
      return can_be_in_experts(entry, names);
    if (!entry.starts_with("re:")) return entry == "Linear" || entry.starts_with(experts);
    return can_match_experts(texts_of_regex(entry.substr(3)), names);
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
                 return can_match_experts(texts_of_regex(entry.pattern), names);
               });
  for (const auto& [key, says] : quant.named) {
    if (MOESAIC_FAULT(checkpoint_extra_config_has_whole_names)) continue;
    if (!can_be_in_experts(key, names) || expert_of(key, experts, projections) >= 0) continue;
    if (says.plain && quant.rule == NameRule::kTextOrRegex) {
      narrow.skips.push_back(key);
    } else {
      narrow.overrides.push_back({key, "", says.difference, "extra_config", says.plain});
    }
  }
  narrow.blocks = quant.blocks;
  return narrow;
}

std::int64_t expert_of(std::string_view name, std::string_view experts,
                       std::span<const std::string_view> projections) {
  if (!name.starts_with(experts)) return -1;
  name.remove_prefix(experts.size());
  const std::size_t dot = name.rfind('.');
  if (!name.starts_with('.') || dot < 2 || dot == name.npos) return -1;
  if (std::find(projections.begin(), projections.end(), name.substr(dot + 1)) ==
      projections.end()) {
    return -1;
  }
  std::int64_t expert = -1;
  const char* const end = name.data() + dot;
  const auto [stop, error] = std::from_chars(name.data() + 1, end, expert);
  return error == std::errc() && stop == end && is_digit(name[1]) ? expert : -1;
}

std::uint64_t entries_cost(const QuantConfig& quant) {
  std::uint64_t cost = 0;
  for (const std::string& entry : quant.skips) cost += entry_cost(quant.rule, entry);
  for (const std::string& entry : quant.only) cost += entry.size() + 1;
  for (const QuantGroup& group : quant.groups) {
    for (const std::string& target : group.targets)
      cost += entry_cost(target_rule(quant.rule), target);
  }
  for (const QuantOverride& entry : quant.overrides)
    cost += entry.pattern.empty() ? entry.key.size() + 1 : regex_cost(entry.pattern);
  for (const auto& [key, says] : quant.named) cost += key.size() + 1;
  for (const std::string& entry : quant.blocks) cost += entry.size() + 1;
  for (const QuantPart& part : quant.parts) cost += part.modules.size() + entries_cost(part.quant);
  return cost;
}

}  // namespace moesaic::checkpoint
