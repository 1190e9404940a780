// Refusals of a field of a spec that is out of range.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

#include "core/refusal.h"
#include "moesaic/status.h"

namespace moesaic {

inline Status at_least(std::string_view field, std::int64_t value, std::int64_t least) {
  if (value >= least) return {};
  return invalid(fmt::format("{}: got {}, need at least {}", field, value, least));
}

inline Status between(std::string_view field, std::int64_t value, std::int64_t low,
                      std::int64_t high, std::string_view high_name) {
  if (value >= low && value <= high) return {};
  return invalid(fmt::format("{}: got {}, need {} to {} ({})", field, value, low, high, high_name));
}

}  // namespace moesaic
