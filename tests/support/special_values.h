// What floats have besides numbers.
#pragma once

#include <limits>

namespace moesaic::test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace moesaic::test
