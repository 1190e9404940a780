// The metadata of a GGUF file, read by key and type; what was not read and speaks of experts is told.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/container/gguf.h"
#include "checkpoint/container/names.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Typed reading of "<architecture>.<key>".
class GgufMetadata {
 public:
  GgufMetadata(std::string_view label, const GgufHeader& header) : label_(label), header_(header) {}

  void set_architecture(std::string name) { prefix_ = std::move(name) + "."; }
  std::string_view architecture() const {
    return std::string_view{prefix_}.substr(0, prefix_.empty() ? 0 : prefix_.size() - 1);
  }

  Status bad(StatusCode code, const std::string& key, std::string_view text) const {
    return {code, fmt::format("{}: metadata {}: {}", label_, quote_name(key), text)};
  }

  Result<std::optional<std::int64_t>> integer(std::string_view name, std::int64_t low,
                                              std::int64_t high) const;

  Result<std::int64_t> required(std::string_view name, std::int64_t low, std::int64_t high) const;

  Result<std::optional<double>> number(std::string_view name) const;

  // A number for each of `count` blocks, or one for all of them; empty: no such key.
  Result<std::vector<double>> numbers(std::string_view name, std::int64_t count) const;

  Result<std::optional<bool>> boolean(std::string_view name) const;

  Result<std::string> string(const std::string& key) const;

  // <architecture>.vocab_size, or as many as the tokenizer has tokens.
  Result<std::int64_t> vocabulary() const;

  // Refuses keys that were not looked up and whose names refer to experts: what they mean is not
  // computed. Which layers have experts is read from the tensors.
  Status check_unread() const;

 private:
  const GgufValue* find(const std::string& key) const;

  // Some writers state a value per layer. All that are not zero must be equal: sizes that differ
  // between MoE layers are not supported.
  Result<std::int64_t> one_of(const std::string& key, const GgufArray& list) const;

  std::string_view label_;
  const GgufHeader& header_;
  std::string prefix_;
  mutable std::set<std::string> read_;
};

}  // namespace moesaic::checkpoint
