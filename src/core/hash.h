// A hash of short texts that is the same on all machines.
#pragma once

#include <cstdint>
#include <string_view>

namespace moesaic {

// FNV-1a, 64 bits.
constexpr std::uint64_t fnv1a(std::string_view text) {
  std::uint64_t h = 14695981039346656037ULL;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return h;
}

}  // namespace moesaic
