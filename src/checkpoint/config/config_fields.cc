#include "checkpoint/config/config_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// A value in a message: numbers in full, text cut, containers by kind only.
std::string describe(const nlohmann::json& value) {
  if (value.is_string()) return quote_name(value.get_ref<const std::string&>());
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  return value.dump();
}

}  // namespace

ConfigFields::ConfigFields(const nlohmann::json& object, std::string where, std::int64_t layer,
                           FieldsRead* read)
    : object_(&object), where_(std::move(where)), layer_(layer), read_(read) {}

const nlohmann::json* ConfigFields::find(std::string_view name) const {
  if (read_ != nullptr) read_->emplace(name);
  const auto it = object_->find(std::string(name));
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

bool ConfigFields::is_null(std::string_view name) const {
  if (read_ != nullptr) read_->emplace(name);
  const auto it = object_->find(std::string(name));
  return it != object_->end() && it->is_null();
}

Status ConfigFields::refuse_null(Names names, std::string_view need, std::string_view none,
                                 std::string_view family_default) const {
  for (const std::string_view name : names) {
    if (!is_null(name) || MOESAIC_FAULT(checkpoint_null_is_default)) continue;
    return {StatusCode::kAmbiguousFormat,
            fmt::format("{}: {}: got null, need {}: {}, or the default of {}?", where_, name, need,
                        none, family_default)};
  }
  return {};
}

Status ConfigFields::refuse_unsaid(std::string_view name, std::string_view readings) const {
  return {StatusCode::kAmbiguousFormat,
          fmt::format("{}: {}: missing, need a number, since implementations disagree: {}", where_,
                      name, readings)};
}

bool ConfigFields::is_list(std::string_view name) const {
  const nlohmann::json* value = find(name);
  return value != nullptr && value->is_array();
}

std::string ConfigFields::difference_of(const nlohmann::json& values) const {
  for (const auto& [name, value] : values.items()) {
    const nlohmann::json* own = find(name);
    if (own != nullptr && *own == value) continue;
    return fmt::format("{}: got {}, need {}", quote_name(name), describe(value),
                       own == nullptr ? "no such field" : describe(*own));
  }
  return {};
}

Status ConfigFields::bad_value(std::string_view field, std::string_view found,
                               std::string_view need) const {
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: {}: got {}, need {}", where_, field, found, need)};
}

Status ConfigFields::unsupported(std::string_view text) const {
  return {StatusCode::kUnsupported, fmt::format("{}: {}", where_, text)};
}

Status ConfigFields::bad_type(std::string_view field, const nlohmann::json& found,
                              std::string_view need) const {
  return {StatusCode::kCorruptFile,
          fmt::format("{}: {}: got {}, need {}", where_, field, describe(found), need)};
}

Result<std::int64_t> ConfigFields::as_integer(std::string_view field, const nlohmann::json& value,
                                              IntegerRange range) const {
  if (layer_ >= 0 && value.is_array()) {
    const auto layer = static_cast<std::size_t>(layer_);
    if (layer < value.size() && !value[layer].is_array()) {
      return as_integer(fmt::format("{}[{}]", field, layer), value[layer], range);
    }
    return bad_type(field, value, fmt::format("an integer, or an entry for layer {}", layer));
  }
  if (!value.is_number_integer()) return bad_type(field, value, "an integer");
  const auto need = [&] { return fmt::format("{} to {}", range.low, range.high); };
  if (value.is_number_unsigned() &&
      value.get<std::uint64_t>() >
          static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return bad_value(field, value.dump(), need());
  }
  const auto number = value.get<std::int64_t>();
  if (number < range.low || number > range.high) {
    return bad_value(field, fmt::to_string(number), need());
  }
  return number;
}

Result<std::optional<std::int64_t>> ConfigFields::integer(Names names, IntegerRange range) const {
  std::optional<std::int64_t> result;
  std::string_view first_name;
  for (const std::string_view name : names) {
    const nlohmann::json* value = find(name);
    if (value == nullptr) continue;
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t number, as_integer(name, *value, range));
    if (result && *result != number) {
      return Status(StatusCode::kAmbiguousFormat,
                    fmt::format("{}: {} is {} but {}, another name of the same field, is {}",
                                where_, first_name, *result, name, number));
    }
    if (!result) first_name = name;
    result = number;
  }
  return result;
}

Result<std::int64_t> ConfigFields::required_integer(Names names, IntegerRange range) const {
  MOESAIC_ASSIGN_OR_RETURN(const std::optional<std::int64_t> value, integer(names, range));
  if (value) return *value;
  std::string list;
  for (const std::string_view name : names) {
    list += list.empty() ? "" : " or ";
    list += name;
  }
  return Status(StatusCode::kCorruptFile,
                fmt::format("{}: {}: missing, need {} to {}", where_, list, range.low, range.high));
}

Result<std::optional<bool>> ConfigFields::boolean(std::string_view name) const {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return std::optional<bool>();
  if (!value->is_boolean()) return bad_type(name, *value, "true or false");
  return std::optional<bool>(value->get<bool>());
}

Result<std::optional<double>> ConfigFields::number(std::string_view name) const {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return std::optional<double>();
  if (layer_ >= 0 && value->is_array()) {
    const auto layer = static_cast<std::size_t>(layer_);
    if (layer >= value->size()) {
      return bad_type(name, *value, fmt::format("a number, or an entry for layer {}", layer));
    }
    value = &(*value)[layer];
    if (value->is_null()) return std::optional<double>();
  }
  if (!value->is_number()) return bad_type(name, *value, "a number");
  const double number = value->get<double>();
  if (!std::isfinite(number)) return bad_value(name, value->dump(), "a finite number");
  return std::optional<double>(number);
}

Result<std::optional<std::string>> ConfigFields::string(std::string_view name) const {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return std::optional<std::string>();
  if (!value->is_string()) return bad_type(name, *value, "a string");
  return std::optional<std::string>(value->get<std::string>());
}

template <typename T, typename Read>
Result<std::optional<std::vector<T>>> ConfigFields::list(std::string_view name,
                                                         std::string_view need,
                                                         std::size_t max_count,
                                                         const Read& read) const {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return std::optional<std::vector<T>>();
  if (!value->is_array()) return bad_type(name, *value, need);
  if (value->size() > max_count) {
    return Status(StatusCode::kLimitExceeded, fmt::format("{}: {}: got {} entries, need at most {}",
                                                          where_, name, value->size(), max_count));
  }
  std::vector<T> entries;
  for (std::size_t i = 0; i < value->size(); ++i) {
    MOESAIC_ASSIGN_OR_RETURN(T entry, read(fmt::format("{}[{}]", name, i), (*value)[i]));
    entries.push_back(std::move(entry));
  }
  return std::optional(std::move(entries));
}

Result<std::optional<std::vector<std::int64_t>>> ConfigFields::integers(
    std::string_view name, IntegerRange range, std::size_t max_count) const {
  return list<std::int64_t>(name, "a list of integers", max_count,
                            [&](const std::string& entry, const nlohmann::json& value) {
                              return as_integer(entry, value, range);
                            });
}

Result<std::optional<std::vector<std::string>>> ConfigFields::strings(std::string_view name,
                                                                      std::size_t max_count) const {
  return list<std::string>(
      name, "a list of strings", max_count,
      [&](const std::string& entry, const nlohmann::json& value) -> Result<std::string> {
        if (!value.is_string()) return bad_type(entry, value, "a string");
        return value.get<std::string>();
      });
}

Result<std::optional<std::vector<std::string>>> ConfigFields::nested_strings(
    std::string_view name, std::size_t max_count) const {
  using Strings = std::vector<std::string>;
  MOESAIC_ASSIGN_OR_RETURN(
      const auto lists,
      list<Strings>(name, "a list of strings", max_count,
                    [&](const std::string& entry, const nlohmann::json& value) -> Result<Strings> {
                      if (value.is_string()) return Strings{value.get<std::string>()};
                      const bool flat = value.is_array() &&
                                        std::all_of(value.begin(), value.end(),
                                                    [](const auto& v) { return v.is_string(); });
                      if (!flat) return bad_type(entry, value, "a string or a list of strings");
                      return value.get<Strings>();
                    }));
  if (!lists) return std::optional<Strings>();
  Strings all;
  for (const Strings& inner : *lists) all.insert(all.end(), inner.begin(), inner.end());
  if (all.size() <= max_count) return std::optional(std::move(all));
  return Status(StatusCode::kLimitExceeded, fmt::format("{}: {}: got {} entries, need at most {}",
                                                        where_, name, all.size(), max_count));
}

Result<std::optional<std::vector<bool>>> ConfigFields::booleans(std::string_view name,
                                                                std::size_t max_count) const {
  return list<bool>(name, "a list of true and false", max_count,
                    [&](const std::string& entry, const nlohmann::json& value) -> Result<bool> {
                      if (value.is_number_unsigned() && value.get<std::uint64_t>() <= 1) {
                        return value.get<std::uint64_t>() == 1;
                      }
                      if (!value.is_boolean()) return bad_type(entry, value, "true or false");
                      return value.get<bool>();
                    });
}

Result<const nlohmann::json*> ConfigFields::object(std::string_view name) const {
  const nlohmann::json* value = find(name);
  if (value != nullptr && !value->is_object()) return bad_type(name, *value, "an object");
  return value;
}

}  // namespace moesaic::checkpoint
