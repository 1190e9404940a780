// f16 by definition rather than by bit tricks: independent of src/numerics, and of a compiler's
// _Float16, which clang 14 lacks on x86-64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace moesaic::test {

inline double half_value(std::uint16_t code) {
  const int exponent = (code >> 10) & 31;
  const int mantissa = code & 1023;
  double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  }
  return (code & 0x8000) != 0 ? -magnitude : magnitude;
}

// Nearest, ties to even; finite inputs that do not overflow.
inline std::uint16_t half_code(double value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double magnitude = std::abs(value);
  const int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
  // Steps of 2^(exponent - 10) from zero of this binade; a carry moves into the exponent by itself.
  const double steps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  return static_cast<std::uint16_t>(sign + static_cast<int>(steps) + 1024 * (exponent + 14));
}

}  // namespace moesaic::test
