// Which of the places for rows of several sources have one, as the device knows it.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

// Rows of several sources, of which each has places for as many: the first live[source] of them are
// there. With `live` null all are.
struct SomeRows {
  const std::int32_t* live = nullptr;  // [sources], on the device; 0 to places
  std::int32_t sources = 0;            // at most kMaxRowSources
  std::int32_t places = 0;             // of a source
  std::int32_t top_k = 0;              // pairs of a row
};
inline constexpr int kMaxRowSources = 32;

}  // namespace moesaic::cuda
