// Tables with one row per enumerator, looked up by the enumerator: the static check that a row is
// where its key says, and the look-up.
#pragma once

#include <array>
#include <cstddef>

namespace moesaic {

// Whether the rows follow the enumeration from 0 without gaps up to `last`.
template <class Row, std::size_t kCount, class Enum>
constexpr bool rows_follow_enum(const std::array<Row, kCount>& rows, Enum Row::*key, Enum last) {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (static_cast<std::size_t>(rows[i].*key) != i) return false;
  }
  return kCount == static_cast<std::size_t>(last) + 1;
}

// The row of a value; null for one outside the enumeration, which callers can make by a cast.
template <class Row, std::size_t kCount, class Enum>
constexpr const Row* row_of_enum(const std::array<Row, kCount>& rows, Enum value) {
  const auto at = static_cast<std::size_t>(value);
  return at < kCount ? &rows[at] : nullptr;
}

}  // namespace moesaic
