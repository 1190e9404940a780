#include "checkpoint/config/gguf_metadata.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <variant>

#include "checkpoint/config/config.h"
#include "checkpoint/config/unread_fields.h"
#include "core/fault.h"

namespace moesaic::checkpoint {

Result<std::optional<std::int64_t>> GgufMetadata::integer(std::string_view name, std::int64_t low,
                                                          std::int64_t high) const {
  const std::string key = prefix_ + std::string(name);
  const GgufValue* value = find(key);
  if (value == nullptr) return std::optional<std::int64_t>();
  std::int64_t number = 0;
  if (const auto* plain = std::get_if<std::int64_t>(value)) {
    number = *plain;
  } else if (const auto* list = std::get_if<GgufArray>(value)) {
    MOESAIC_ASSIGN_OR_RETURN(number, one_of(key, *list));
  } else {
    return bad(StatusCode::kCorruptFile, key,
               fmt::format("got {}, need an integer", gguf_kind_name(*value)));
  }
  if (number < low || number > high) {
    return bad(number > high && high >= kMaxWidth ? StatusCode::kLimitExceeded
                                                  : StatusCode::kInvalidArgument,
               key, fmt::format("got {}, need {} to {}", number, low, high));
  }
  return std::optional<std::int64_t>(number);
}

Result<std::int64_t> GgufMetadata::required(std::string_view name, std::int64_t low,
                                            std::int64_t high) const {
  MOESAIC_ASSIGN_OR_RETURN(const auto value, integer(name, low, high));
  if (value) return *value;
  return bad(StatusCode::kCorruptFile, prefix_ + std::string(name), "missing, need an integer");
}

Result<std::optional<double>> GgufMetadata::number(std::string_view name) const {
  const std::string key = prefix_ + std::string(name);
  const GgufValue* value = find(key);
  if (value == nullptr) return std::optional<double>();
  const auto* plain = std::get_if<double>(value);
  if (plain == nullptr || !std::isfinite(*plain)) {
    return bad(StatusCode::kCorruptFile, key,
               fmt::format("got {}, need a finite number", plain == nullptr
                                                               ? std::string(gguf_kind_name(*value))
                                                               : fmt::to_string(*plain)));
  }
  return std::optional<double>(*plain);
}

Result<std::vector<double>> GgufMetadata::numbers(std::string_view name, std::int64_t count) const {
  const std::string key = prefix_ + std::string(name);
  const GgufValue* value = find(key);
  if (value == nullptr) return std::vector<double>();
  const auto* list = std::get_if<GgufArray>(value);
  if (list == nullptr) {
    MOESAIC_ASSIGN_OR_RETURN(const auto one, number(name));
    return std::vector<double>(static_cast<std::size_t>(count), *one);
  }
  if (list->numbers.size() != static_cast<std::size_t>(count)) {
    return bad(
        StatusCode::kCorruptFile, key,
        fmt::format("got a list of {}, need a number for each of {} blocks", list->count, count));
  }
  for (const double number : list->numbers) {
    if (!std::isfinite(number)) {
      return bad(StatusCode::kCorruptFile, key, fmt::format("got {}, need finite numbers", number));
    }
  }
  return list->numbers;
}

Result<std::optional<bool>> GgufMetadata::boolean(std::string_view name) const {
  const std::string key = prefix_ + std::string(name);
  const GgufValue* value = find(key);
  if (value == nullptr) return std::optional<bool>();
  if (const auto* flag = std::get_if<bool>(value)) return std::optional<bool>(*flag);
  return bad(StatusCode::kCorruptFile, key,
             fmt::format("got {}, need a bool", gguf_kind_name(*value)));
}

Result<std::string> GgufMetadata::string(const std::string& key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return bad(StatusCode::kCorruptFile, key, "missing, need a string");
  if (const auto* text = std::get_if<std::string>(value)) return *text;
  return bad(StatusCode::kCorruptFile, key,
             fmt::format("got {}, need a string", gguf_kind_name(*value)));
}

Result<std::int64_t> GgufMetadata::vocabulary() const {
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, integer("vocab_size", 1, kMaxWidth));
  if (stated) return *stated;
  const std::string key = "tokenizer.ggml.tokens";
  const GgufValue* value = find(key);
  const auto* list = value == nullptr ? nullptr : std::get_if<GgufArray>(value);
  if (list != nullptr && list->count > 0 && list->count <= std::uint64_t{kMaxWidth}) {
    return static_cast<std::int64_t>(list->count);
  }
  return bad(StatusCode::kCorruptFile, prefix_ + "vocab_size",
             fmt::format("missing, and {} is no list of tokens", key));
}

Status GgufMetadata::check_unread() const {
  constexpr auto kLayers =
      std::to_array<std::string_view>({"interleave_moe_layer_step", "moe_every_n_layers"});
  for (const auto& [key, value] : header_.metadata) {
    if (!key.starts_with(prefix_) || read_.contains(key)) continue;
    const std::string_view name = std::string_view{key}.substr(prefix_.size());
    const bool layers = std::find(kLayers.begin(), kLayers.end(), name) != kLayers.end();
    // "attention.indexer.top_k" is of sparse attention.
    const bool attention = name.starts_with("attention.");
    if (layers || attention || !speaks_of_experts(name) || MOESAIC_FAULT(gguf_accept_unknown_keys))
      continue;
    return bad(StatusCode::kUnsupported, key,
               "not known to this version, and its name speaks of experts or routing");
  }
  return {};
}

const GgufValue* GgufMetadata::find(const std::string& key) const {
  read_.insert(key);
  const auto it = header_.metadata.find(key);
  return it == header_.metadata.end() ? nullptr : &it->second;
}

Result<std::int64_t> GgufMetadata::one_of(const std::string& key, const GgufArray& list) const {
  std::int64_t found = 0;
  for (const std::int64_t value : list.integers) {
    if (value == 0 || value == found) continue;
    if (found != 0) {
      return bad(StatusCode::kUnsupported, key,
                 fmt::format("got a list with {} and {}, need one value", found, value));
    }
    found = value;
  }
  if (!list.kept || list.integers.empty()) {
    return bad(StatusCode::kCorruptFile, key, "got a list, need an integer");
  }
  return found;
}

}  // namespace moesaic::checkpoint
