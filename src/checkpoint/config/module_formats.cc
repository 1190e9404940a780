// Which format a module has: the names and patterns of a quantisation's configuration, and experts
// that must agree. Declared in quant_config.h.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <utility>

#include "checkpoint/config/expert_entries.h"
#include "checkpoint/config/module_patterns.h"
#include "checkpoint/config/quant_config.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "core/refusal.h"

namespace moesaic::checkpoint {
namespace {

using Parts = std::vector<std::string_view>;

Parts split(std::string_view name) {
  Parts parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = name.find('.', begin);
    parts.push_back(name.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

bool part_matches(std::string_view pattern, std::string_view part) {
  return pattern == "*" || pattern == part;
}

// Whether the pattern's parts appear side by side in the name; `at_end`: as its last parts.
bool contains(const Parts& name, const Parts& pattern, bool at_end = false) {
  if (pattern.size() > name.size()) return false;
  const std::size_t last = name.size() - pattern.size();
  for (std::size_t start = at_end ? last : 0; start <= last; ++start) {
    if (std::equal(pattern.begin(), pattern.end(),
                   name.begin() + static_cast<std::ptrdiff_t>(start), part_matches)) {
      return true;
    }
  }
  return false;
}

bool is_number(std::string_view part) {
  return !part.empty() && std::all_of(part.begin(), part.end(),
                                      [](unsigned char c) { return std::isdigit(c) != 0; });
}

// Whether the module has this name or is inside one that has.
bool is_within(std::string_view module, std::string_view name) {
  const std::size_t end = name.size();
  return module.size() >= end && (module.size() == end || module[end] == '.') &&
         module.starts_with(name);
}

bool entry_matches(NameRule rule, const std::string& entry, std::string_view module) {
  switch (rule) {
    case NameRule::kParts:
      // A bare number would match any layer or expert that happens to have it.
      return !is_number(entry) && contains(split(module), split(entry));
    case NameRule::kExactOrRegex:
      if (!entry.starts_with("re:")) return entry == module || entry == "Linear";
      return regex_hits(entry.substr(3), module);
    case NameRule::kTextOrRegex:
      return entry.starts_with("re:") ? regex_hits(entry.substr(3), module)
                                      : module.find(entry) != std::string_view::npos;
    case NameRule::kGlob:
      return glob_matches(entry, std::string(module)) || is_within(module, entry);
    case NameRule::kName:
      return is_within(module, entry);
  }
  return false;
}

bool any_matches(NameRule rule, const std::vector<std::string>& entries, std::string_view module) {
  return std::any_of(entries.begin(), entries.end(),
                     [&](const std::string& entry) { return entry_matches(rule, entry, module); });
}

// Models of text inside others have their names with and without this; writers and files differ.
std::string without_wrapper(std::string_view name) {
  constexpr std::string_view kWrapper = "language_model.";
  std::string text(name);
  const std::size_t at = text.find(kWrapper);
  if (at != text.npos && (at == 0 || text[at - 1] == '.')) text.erase(at, kWrapper.size());
  return text;
}

// A block's name ends anywhere: its own readers compare beginnings ("layers.1" is that of layer 10).
bool is_in_blocks(const QuantConfig& quant, std::string_view module) {
  const auto inside = [&](const std::string& block) {
    return module.starts_with(block) || without_wrapper(module).starts_with(without_wrapper(block));
  };
  return quant.blocks.empty() || MOESAIC_FAULT(checkpoint_blocks_are_ignored) ||
         std::any_of(quant.blocks.begin(), quant.blocks.end(), inside);
}

// What extra_config says of the linear of exactly this name; null: nothing.
const NamedModule* named_module(const QuantConfig& quant, std::string_view module) {
  const auto found = quant.named.find(module);
  return found == quant.named.end() || MOESAIC_FAULT(checkpoint_names_are_parts) ? nullptr
                                                                                 : &found->second;
}

bool has_digits(std::string_view pattern) {
  return std::any_of(pattern.begin(), pattern.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; }) ||
         pattern.find("\\d") != std::string_view::npos;
}

// Whether an entry may match some experts and not others. A whole name must be one of theirs; a
// pattern, or a part of a name, without digits can distinguish only the number of digits.
bool tells_experts(NameRule rule, const std::string& entry, std::string_view experts) {
  const bool whole =
      rule == NameRule::kName || (rule == NameRule::kExactOrRegex && !entry.starts_with("re:"));
  return whole ? entry.starts_with(experts) : has_digits(entry);
}

// All, or one per number of digits and the last.
std::vector<std::int64_t> asked_experts(bool all, std::int64_t num_experts) {
  std::vector<std::int64_t> asked;
  std::int64_t power = 10;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const bool first_of_its_length = e == 0 || e == power;
    if (e == power) power *= 10;
    if (all || first_of_its_length || e == num_experts - 1) asked.push_back(e);
  }
  return asked;
}

Status too_much_work(std::string_view what, std::uint64_t steps, std::int64_t layers) {
  return {StatusCode::kLimitExceeded,
          fmt::format("quantization_config: {}: got about {} steps to match all names for each of "
                      "{} layers, need at most {} in all; fewer or shorter patterns",
                      what, steps, layers, kMaxMatchSteps)};
}

// The experts whose names are checked one by one.
std::vector<std::int64_t> telling_experts(const QuantConfig& quant, std::string_view experts,
                                          std::int64_t num_experts) {
  const auto tell = [&](NameRule rule, const std::vector<std::string>& entries) {
    return std::any_of(entries.begin(), entries.end(), [&](const std::string& entry) {
      return tells_experts(rule, entry, experts);
    });
  };
  bool all = tell(quant.rule, quant.skips) ||
             std::any_of(quant.only.begin(), quant.only.end(), has_digits);
  for (const QuantGroup& group : quant.groups) {
    all = all || tell(target_rule(quant.rule), group.targets);
  }
  all = all || std::any_of(quant.blocks.begin(), quant.blocks.end(), [&](const auto& block) {
          return without_wrapper(block).size() > without_wrapper(experts).size();
        });
  return asked_experts(all, num_experts);
}

Status partly(std::string_view what, std::string_view experts, std::string_view one,
              std::string_view other) {
  return unsupported(
      fmt::format("quantization_config: of the expert projections of {} some are {} "
                  "({}), others are not ({}); need all or none",
                  experts, what, one, other));
}

// Whether an entry of extra_config names a projection of these experts.
bool names_projections(const QuantConfig& quant, std::string_view experts) {
  const auto first = quant.named.lower_bound(experts);
  return first != quant.named.end() && first->first.starts_with(experts);
}

// skips_experts by checking each member.
Result<bool> skips_each(const QuantConfig& quant, std::string_view experts,
                        std::int64_t num_experts, std::span<const std::string_view> projections) {
  std::string skipped, kept;
  const QuantConfig narrow = narrowed(quant, experts, projections);
  const bool by_name = quant.rule == NameRule::kTextOrRegex && names_projections(quant, experts);
  for (const std::int64_t e :
       by_name ? asked_experts(true, num_experts) : telling_experts(narrow, experts, num_experts)) {
    for (const std::string_view projection : projections) {
      std::string name = fmt::format("{}.{}.{}", experts, e, projection);
      const NamedModule* own = by_name ? named_module(quant, name) : nullptr;
      const bool skip = own != nullptr ? own->plain : skips_module(narrow, name);
      (skip ? skipped : kept) = std::move(name);
    }
  }
  if (!skipped.empty() && !kept.empty()) return partly("left out", experts, skipped, kept);
  return kept.empty();
}

// Of a module that no skip entry names.
Status check_group(const QuantConfig& quant, std::string_view module) {
  const QuantGroup* group = group_of(quant, module);
  if (group == nullptr || group->unread.empty() || MOESAIC_FAULT(checkpoint_unread_is_plain)) {
    return {};
  }
  return unsupported(fmt::format("quantization_config: {}: {}", module, group->unread));
}

// Of a module that the entry speaks of.
Status check_difference(const QuantConfig& quant, const QuantOverride& entry,
                        std::string_view module) {
  const auto refuse = [&](StatusCode code, std::string_view why) {
    return Status(code, fmt::format("quantization_config: {}: {} matches {}{}", entry.list,
                                    quote_name(entry.key), module, why));
  };
  if (skips_module(quant, module)) {
    if (entry.plain) return {};
    if (!is_in_blocks(quant, module)) {
      return refuse(StatusCode::kAmbiguousFormat,
                    ", outside of block_name_to_quantize, where readers differ in whether that "
                    "counts; need its whole name");
    }
    return refuse(StatusCode::kAmbiguousFormat,
                  ", as an entry does that leaves it out; need one of them");
  }
  if (entry.difference.empty()) return {};
  return refuse(StatusCode::kUnsupported,
                fmt::format(" and overrides {}, as everywhere else", entry.difference));
}

bool speaks_of(const QuantOverride& entry, std::string_view module) {
  return entry.pattern.empty() ? module.find(entry.key) != module.npos
                               : regex_hits(entry.pattern, module);
}

Status check_named(const QuantConfig& quant, const std::string& name, const NamedModule& says) {
  return check_difference(quant, {name, "", says.difference, "extra_config", says.plain}, name);
}

Status check_override(const QuantConfig& quant, const QuantOverride& entry,
                      std::string_view module) {
  if (!speaks_of(entry, module) || named_module(quant, module) != nullptr) return {};
  return check_difference(quant, entry, module);
}

Status check_expert_overrides(const QuantConfig& quant, const std::vector<QuantOverride>& overrides,
                              std::string_view experts, std::int64_t num_experts,
                              std::span<const std::string_view> projections) {
  for (auto it = quant.named.lower_bound(experts);
       it != quant.named.end() && it->first.starts_with(experts); ++it) {
    const std::int64_t e = expert_of(it->first, experts, projections);
    if (e < 0 || e >= num_experts) continue;
    MOESAIC_RETURN_IF_ERROR(check_named(quant, it->first, it->second));
  }
  // Names that have an entry of their own are passed over, whichever experts those are.
  const bool all = names_projections(quant, experts);
  for (const QuantOverride& entry : overrides) {
    const bool digits = has_digits(entry.pattern.empty() ? entry.key : entry.pattern);
    for (const std::int64_t e : asked_experts(all || digits, num_experts)) {
      for (const std::string_view projection : projections) {
        MOESAIC_RETURN_IF_ERROR(
            check_override(quant, entry, fmt::format("{}.{}.{}", experts, e, projection)));
      }
    }
  }
  return {};
}

}  // namespace

Status check_match_steps(const QuantConfig& quant, std::int64_t num_layers) {
  // A layer asks about its experts as a whole and about the linears of its shared expert, skip lists
  // and groups apart.
  constexpr std::uint64_t kNamesOfLayer = 8;
  const std::uint64_t steps = kNamesOfLayer * entries_cost(quant);
  if (steps <= kMaxMatchSteps / static_cast<std::uint64_t>(std::max<std::int64_t>(num_layers, 1)))
    return {};
  return too_much_work("its entries", steps, num_layers);
}

const QuantConfig& description_of(const QuantConfig& quant, std::string_view module) {
  if (MOESAIC_FAULT(checkpoint_quant_parts_ignored)) return quant;
  for (const QuantPart& part : quant.parts) {
    for (const std::string& name : part.modules) {
      if (is_within(module, name)) return part.quant;
    }
  }
  return quant;
}

bool skips_module(const QuantConfig& quant, std::string_view module) {
  if (quant.rule == NameRule::kTextOrRegex) {
    if (const NamedModule* own = named_module(quant, module)) return own->plain;
    for (const auto& [key, says] : quant.named) {
      if (says.plain && module.find(key) != module.npos) return true;
    }
  }
  if (any_matches(quant.rule, quant.skips, module) || !is_in_blocks(quant, module)) return true;
  return !quant.only.empty() && !MOESAIC_FAULT(checkpoint_only_is_ignored) &&
         std::none_of(quant.only.begin(), quant.only.end(), [&](const std::string& entry) {
           return module.find(entry) != std::string_view::npos;
         });
}

// Names before patterns, patterns before the class; of several names that the module lies in the
// innermost, of several patterns the alphabetically first, whatever the groups' order.
const QuantGroup* group_of(const QuantConfig& quant, std::string_view module) {
  for (const int round : {0, 1, 2}) {
    const QuantGroup* found = nullptr;
    std::string_view first;
    for (const QuantGroup& group : quant.groups) {
      for (const std::string& target : group.targets) {
        const int kind = target == "Linear" ? 2 : target.starts_with("re:") ? 1 : 0;
        const bool later =
            found != nullptr && (round == 0 && !MOESAIC_FAULT(checkpoint_shortest_name_counts)
                                     ? target.size() <= first.size()
                                     : target >= first);
        if (kind != round || later || !entry_matches(target_rule(quant.rule), target, module)) {
          continue;
        }
        found = &group;
        first = target;
        if (MOESAIC_FAULT(checkpoint_first_group_wins)) return found;
      }
    }
    if (found != nullptr) return found;
  }
  return nullptr;
}

bool is_quantised_as_linear(const QuantConfig& whole, std::string_view module) {
  const QuantConfig& quant = description_of(whole, module);
  const StoredFormat stored = quant.linear.stored;
  if (quant.groups.empty()) return stored == StoredFormat::kBnb4 || stored == StoredFormat::kBnb8;
  const QuantGroup* group = group_of(quant, module);
  return group != nullptr &&
         std::none_of(group->targets.begin(), group->targets.end(), [&](const std::string& target) {
           return target != "Linear" && entry_matches(target_rule(quant.rule), target, module);
         });
}

Status check_overrides(const QuantConfig& whole, std::string_view module) {
  const QuantConfig& quant = description_of(whole, module);
  for (const QuantOverride& entry : quant.overrides) {
    MOESAIC_RETURN_IF_ERROR(check_override(quant, entry, module));
  }
  const auto own = quant.named.find(module);
  if (own != quant.named.end()) {
    MOESAIC_RETURN_IF_ERROR(check_named(quant, own->first, own->second));
  }
  for (const auto& [key, says] : quant.named) {
    if (module.find(key) == module.npos) continue;
    MOESAIC_RETURN_IF_ERROR(
        check_override(quant, {key, "", says.difference, "extra_config", says.plain}, module));
  }
  return skips_module(quant, module) ? Status() : check_group(quant, module);
}

LinearFormat module_format(const QuantConfig& whole, std::string_view module) {
  const QuantConfig& quant = description_of(whole, module);
  if (!quant.quantized() || skips_module(quant, module)) return {};
  if (quant.groups.empty()) return quant.linear;
  const QuantGroup* group = group_of(quant, module);
  return group != nullptr ? group->format : LinearFormat{};
}

Result<LinearFormat> experts_format(const QuantConfig& whole, std::string_view experts,
                                    std::int64_t num_experts,
                                    std::span<const std::string_view> projections,
                                    std::int64_t num_layers) {
  const QuantConfig& quant = description_of(whole, experts);
  if (!quant.quantized()) return LinearFormat{};
  const QuantConfig narrow = narrowed(quant, experts, projections);
  if (quant.rule != NameRule::kParts || !quant.overrides.empty() || !quant.only.empty() ||
      !quant.named.empty() || !quant.blocks.empty()) {
    const std::uint64_t names = narrow.overrides.empty()
                                    ? telling_experts(narrow, experts, num_experts).size()
                                    : static_cast<std::uint64_t>(num_experts);
    const std::uint64_t steps = names * projections.size() * entries_cost(narrow);
    if (steps > kMaxMatchSteps / static_cast<std::uint64_t>(std::max<std::int64_t>(num_layers, 1)))
      return too_much_work(experts, steps, num_layers);
  }
  MOESAIC_RETURN_IF_ERROR(
      check_expert_overrides(quant, narrow.overrides, experts, num_experts, projections));
  MOESAIC_ASSIGN_OR_RETURN(const bool skipped,
                           skips_experts(quant, experts, num_experts, projections));
  if (skipped) return LinearFormat{};
  if (quant.groups.empty()) return quant.linear;
  std::string first_name;
  LinearFormat first;
  for (const std::int64_t e : telling_experts(narrow, experts, num_experts)) {
    for (const std::string_view projection : projections) {
      const std::string name = fmt::format("{}.{}.{}", experts, e, projection);
      MOESAIC_RETURN_IF_ERROR(check_group(narrow, name));
      const LinearFormat format = module_format(narrow, name);
      if (first_name.empty()) {
        first_name = name;
        first = format;
      } else if (!(format == first)) {
        return partly(fmt::format("of the format {}", stored_format_name(first.stored)), experts,
                      first_name, name);
      }
    }
  }
  return first;
}

Result<bool> skips_experts(const QuantConfig& quant, std::string_view experts,
                           std::int64_t num_experts,
                           std::span<const std::string_view> projections) {
  const bool none =
      quant.skips.empty() && quant.only.empty() && quant.named.empty() && quant.blocks.empty();
  if (none || MOESAIC_FAULT(checkpoint_skip_list_ignored)) return false;
  // A text or an expression that is searched for may hit this name and none of the linears'.
  const bool searched = quant.rule == NameRule::kTextOrRegex;
  if (!searched && any_matches(quant.rule, quant.skips, experts)) return true;
  if (quant.rule != NameRule::kParts || !quant.only.empty() || !quant.blocks.empty()) {
    return skips_each(quant, experts, num_experts, projections);
  }

  // Entries that reach below the experts module: "<experts>.<e>", "<experts>.<e>.<projection>",
  // "<experts>.<projection>", or the ends of these names.
  const Parts prefix = split(experts);
  std::set<std::pair<std::int64_t, std::size_t>> listed;
  std::vector<bool> whole(projections.size(), false);
  const auto list = [&](std::string_view expert, std::size_t projection) {
    if (whole[projection]) return;
    if (expert == "*") {
      whole[projection] = true;
      for (std::int64_t e = 0; e < num_experts; ++e) listed.emplace(e, projection);
    } else if (expert.size() <= 9) {  // longer numbers are no expert of ours
      const std::int64_t e = std::stoll(std::string(expert));
      if (e < num_experts) listed.emplace(e, projection);
    }
  };
  for (const std::string& entry : quant.skips) {
    Parts parts = split(entry);
    const auto named = std::find(projections.begin(), projections.end(), parts.back());
    const bool has_projection = named != projections.end();
    if (has_projection) parts.pop_back();
    const bool has_expert = !parts.empty() && (is_number(parts.back()) || parts.back() == "*");
    const std::string_view expert = has_expert ? parts.back() : "*";
    if (has_expert) parts.pop_back();
    if (!has_projection && !has_expert) continue;
    // A bare number says nothing about experts; a bare projection names it in every expert.
    if (parts.empty() ? !has_projection : !contains(prefix, parts, /*at_end=*/true)) continue;
    const auto first = static_cast<std::size_t>(named - projections.begin());
    for (std::size_t p = has_projection ? first : 0;
         p < (has_projection ? first + 1 : projections.size()); ++p) {
      list(expert, p);
    }
  }
  const std::size_t all = static_cast<std::size_t>(num_experts) * projections.size();
  if (listed.empty()) return false;
  if (listed.size() == all) return true;
  // Name one of each group, so that the reader finds the odd one.
  std::pair<std::int64_t, std::size_t> missing{0, 0};
  for (std::size_t i = 0; i < all; ++i) {
    missing = {static_cast<std::int64_t>(i / projections.size()), i % projections.size()};
    if (listed.count(missing) == 0) break;
  }
  const auto name = [&](const auto& member) {
    return fmt::format("{}.{}.{}", experts, member.first, projections[member.second]);
  };
  return unsupported(
      fmt::format("quantization_config: {} of {} expert projections of {} are left out ({}), the "
                  "others are not "
                  "({}); need all or none",
                  listed.size(), all, experts, name(*listed.begin()), name(missing)));
}

}  // namespace moesaic::checkpoint
