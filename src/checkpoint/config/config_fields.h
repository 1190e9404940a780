// Typed, range-checked reading of the fields of one JSON object. Every refusal names the field, the
// value found and the value needed. A field that is missing and one that is null are the same, but for
// refuse_null and is_null.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Inclusive. A value below `low` or above `high` is kInvalidArgument.
struct IntegerRange {
  std::int64_t low;
  std::int64_t high;
};

// Names of fields that were looked up, present or not; any other field of the configuration was not
// understood.
using FieldsRead = std::set<std::string, std::less<>>;

class ConfigFields {
 public:
  // `object` must be a JSON object that outlives this; `where` begins every message
  // ("config.json", "config.json: text_config").
  // With `layer` >= 0 a number may also be a list, whose entry at `layer` counts (null: absent).
  // `read`, where there is one, outlives this and collects the names that are looked up.
  ConfigFields(const nlohmann::json& object, std::string where, std::int64_t layer = -1,
               FieldsRead* read = nullptr);

  // The field under any of its names (aliases). Two names with different values are
  // kAmbiguousFormat; a value of another type is kCorruptFile.
  using Names = std::span<const std::string_view>;
  Result<std::optional<std::int64_t>> integer(Names names, IntegerRange range) const;
  Result<std::optional<std::int64_t>> integer(std::string_view name, IntegerRange range) const {
    return integer(Names(&name, 1), range);
  }
  // The same, but kCorruptFile when absent.
  Result<std::int64_t> required_integer(Names names, IntegerRange range) const;

  Result<std::optional<bool>> boolean(std::string_view name) const;
  Result<std::optional<double>> number(std::string_view name) const;  // finite
  Result<std::optional<std::string>> string(std::string_view name) const;
  // A list, at most `max_count` long (more is kLimitExceeded). Of booleans also 0 and 1.
  Result<std::optional<std::vector<std::int64_t>>> integers(std::string_view name,
                                                            IntegerRange range,
                                                            std::size_t max_count) const;
  Result<std::optional<std::vector<std::string>>> strings(std::string_view name,
                                                          std::size_t max_count) const;
  // Of strings, or of lists of them, one behind the other; at most `max_count` in all.
  Result<std::optional<std::vector<std::string>>> nested_strings(std::string_view name,
                                                                 std::size_t max_count) const;
  Result<std::optional<std::vector<bool>>> booleans(std::string_view name,
                                                    std::size_t max_count) const;
  // The nested object, or nullptr when absent.
  Result<const nlohmann::json*> object(std::string_view name) const;

  // Present with the value null: some fields say "none" that way.
  bool is_null(std::string_view name) const;
  // kAmbiguousFormat for the first of the names that is null, where that might mean `none` or the
  // family's default: "config.json: n_group: got null, need a number: none, or the default of 8?".
  Status refuse_null(Names names, std::string_view need, std::string_view none,
                     std::string_view family_default) const;
  // kAmbiguousFormat for a number that is not there, whose absence implementations read in several
  // ways.
  Status refuse_unsaid(std::string_view name, std::string_view readings) const;
  bool is_list(std::string_view name) const;

  // The first member of `values` that this object does not have as well: "bits: got 8, need 4";
  // empty when there is none.
  std::string difference_of(const nlohmann::json& values) const;

  const std::string& where() const { return where_; }
  // "config.json: top_k: got 9, need 1 to 8".
  Status bad_value(std::string_view field, std::string_view found, std::string_view need) const;
  // kUnsupported, "config.json: quantization_config: <text>".
  Status unsupported(std::string_view text) const;

 private:
  const nlohmann::json* find(std::string_view name) const;
  Status bad_type(std::string_view field, const nlohmann::json& found, std::string_view need) const;
  // `read`(name of the entry, its JSON) -> Result<T>.
  template <typename T, typename Read>
  Result<std::optional<std::vector<T>>> list(std::string_view name, std::string_view need,
                                             std::size_t max_count, const Read& read) const;
  Result<std::int64_t> as_integer(std::string_view field, const nlohmann::json& value,
                                  IntegerRange range) const;

  const nlohmann::json* object_;
  std::string where_;
  std::int64_t layer_;
  FieldsRead* read_;
};

}  // namespace moesaic::checkpoint
