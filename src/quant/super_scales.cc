#include "quant/super_scales.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "moesaic/quant.h"
#include "numerics/float_codec.h"

namespace moesaic::quant {
namespace {

constexpr std::size_t kMostGroups = kSuperBlockColumns / 16;

// The exponent of the last bit of x, which is finite and not 0.
int last_bit(float x) {
  int exponent = 0;
  const float fraction = std::frexp(x, &exponent);
  auto bits = static_cast<std::int64_t>(std::ldexp(fraction, 24));
  exponent -= 24;
  for (; bits % 2 == 0; bits /= 2) ++exponent;
  return exponent;
}

}  // namespace

// All values are integers in units of the smallest last bit, so their greatest common divisor, over
// a number by which the integers may be larger, is the unit sought.
bool split_super_scales(std::span<const float> values, int bits, std::int8_t* codes,
                        std::uint16_t* unit) {
  std::fill_n(codes, values.size(), std::int8_t{0});
  *unit = 0;
  int least = std::numeric_limits<int>::max(), most = std::numeric_limits<int>::min();
  for (const float v : values) {
    if (!std::isfinite(v)) return false;
    if (v == 0) continue;
    least = std::min(least, last_bit(v));
    most = std::max(most, std::ilogb(v));
  }
  if (least > most) return true;        // zeros
  if (most - least > 30) return false;  // 11 bits times 8 have 19
  std::array<std::int64_t, kMostGroups> integers{};
  std::int64_t divisor = 0, high = 0, low = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    integers[i] = static_cast<std::int64_t>(std::ldexp(static_cast<double>(values[i]), -least));
    divisor = std::gcd(divisor, integers[i]);
    high = std::max(high, integers[i]);
    low = std::min(low, integers[i]);
  }
  const std::int64_t most_code = bits == 6 ? 63 : 127, least_code = bits == 6 ? 0 : -128;
  for (const int sign : {1, -1}) {
    const std::int64_t top = (sign > 0 ? high : -low) / divisor;
    const std::int64_t bottom = (sign > 0 ? low : -high) / divisor;
    for (std::int64_t t = 1; top * t <= most_code && bottom * t >= least_code; ++t) {
      const double d =
          std::ldexp(static_cast<double>(sign * divisor), least) / static_cast<double>(t);
      const auto narrow = static_cast<float>(d);
      const std::uint16_t code = f16_from_f32(narrow);
      // t divides nothing that is not a multiple of it: then d * t is another number.
      const double back = static_cast<double>(f32_from_f16(code));
      if (back * static_cast<double>(t) != std::ldexp(static_cast<double>(sign * divisor), least))
        continue;
      *unit = code;
      for (std::size_t i = 0; i < values.size(); ++i)
        codes[i] = static_cast<std::int8_t>(sign * integers[i] / divisor * t);
      return true;
    }
  }
  return false;
}

}  // namespace moesaic::quant
