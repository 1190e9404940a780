// Checks of the permutations' arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "moesaic/status.h"

namespace moesaic::interop {

inline constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// kInvalidShape unless got == need (or more, if allowed).
inline Status expect_length(const char* field, std::size_t got, std::int64_t need,
                            bool or_more = false) {
  const auto least = static_cast<std::size_t>(need);
  if (got == least || (or_more && got > least)) return {};
  return Status(StatusCode::kInvalidShape, std::string(field) + ": got " + std::to_string(got) +
                                               " entries, need " + (or_more ? ">= " : "") +
                                               std::to_string(need));
}

// kInvalidArgument unless low <= got <= high; kLimitExceeded above what 32-bit indices reach.
inline Status expect_range(const char* field, std::int64_t got, std::int64_t low,
                           std::int64_t high = kMaxInt32) {
  if (got >= low && got <= high) return {};
  const bool limit = got > high && high == kMaxInt32;
  return Status(limit ? StatusCode::kLimitExceeded : StatusCode::kInvalidArgument,
                std::string(field) + ": got " + std::to_string(got) + ", need " +
                    std::to_string(low) + " .. " +
                    (high == kMaxInt32 ? std::string("2^31-1") : std::to_string(high)));
}

}  // namespace moesaic::interop
