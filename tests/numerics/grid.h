// An independent description of a small float format for tests: values by ldexp from the format's
// definition, encoding by searching the nearest value. Shares no code with src/numerics.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace moesaic::test {

struct Format {
  std::string name;
  int exponent_bits;
  int mantissa_bits;
  int bias;
  std::uint32_t max_code;  // largest finite non-negative code
  bool saturates;          // else overflow gives max_code + 1 (infinity)
};

inline std::vector<Format> formats() {
  return {
      {"bf16", 8, 7, 127, 0x7F7F, false}, {"f16", 5, 10, 15, 0x7BFF, false},
      {"e4m3", 4, 3, 7, 0x7E, true},      {"e5m2", 5, 2, 15, 0x7B, true},
      {"e2m1", 2, 1, 1, 0x7, true},
  };
}

inline double value_of_code(const Format& f, std::uint32_t code) {
  const int mantissa = static_cast<int>(code & ((1U << f.mantissa_bits) - 1U));
  const int exponent = static_cast<int>(code >> f.mantissa_bits);
  if (exponent == 0) return std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits);
  return std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - f.bias - f.mantissa_bits);
}

// Encodes magnitudes by their place among the midpoints between neighbouring values. Midpoints are
// exact in double: one more bit than the format.
class NearestCode {
 public:
  explicit NearestCode(const Format& format) : format_(format) {
    // An overflowing format rounds as if one more value followed the largest one.
    const std::uint32_t last = format.saturates ? format.max_code : format.max_code + 1;
    for (std::uint32_t code = 0; code < last; ++code) {
      midpoints_.push_back(0.5 * (value_of_code(format, code) + value_of_code(format, code + 1)));
    }
  }

  const std::vector<double>& midpoints() const { return midpoints_; }

  // `hint` is any code; the search walks from it, so ascending inputs cost O(1) each.
  std::uint32_t encode(double magnitude, std::uint32_t hint) const {
    std::uint32_t code = hint;
    while (code > 0 && magnitude < midpoints_[code - 1]) --code;
    while (code < midpoints_.size() && magnitude > midpoints_[code]) ++code;
    // Exactly on a midpoint: of the two neighbours the even code.
    if (code < midpoints_.size() && magnitude == midpoints_[code] && code % 2 == 1) return code + 1;
    if (code > 0 && magnitude == midpoints_[code - 1] && code % 2 == 1) return code - 1;
    return code;
  }
  std::uint32_t encode(double magnitude) const {
    const auto at = std::lower_bound(midpoints_.begin(), midpoints_.end(), magnitude);
    return encode(magnitude, static_cast<std::uint32_t>(at - midpoints_.begin()));
  }

 private:
  Format format_;
  std::vector<double> midpoints_;
};

}  // namespace moesaic::test
