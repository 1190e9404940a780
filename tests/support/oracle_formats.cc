#include "support/oracle_formats.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "support/half.h"

namespace moesaic::test {
namespace {

// Nearest multiple of the spacing of a binary format at |v|, ties to even.
double round_to_grid(double v, int mantissa_bits, int min_exponent) {
  if (v == 0 || !std::isfinite(v)) return v;
  const int exponent = std::max(std::ilogb(v), min_exponent);
  const double step = std::ldexp(1.0, exponent - mantissa_bits);
  return std::nearbyint(v / step) * step;
}

double e4m3_value(std::uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? mantissa * 0x1p-9 : (1.0 + mantissa / 8.0) * std::ldexp(1.0, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}
// Two per byte, low one first.
int nibble(const ConstTensorView& t, std::int64_t i) {
  return (t.as<std::uint8_t>()[i / 2] >> (i % 2 * 4)) & 15;
}

// bitsandbytes tables, by code.
constexpr double kNf4[16] = {-1.0,
                             -0.6961928009986877,
                             -0.5250730514526367,
                             -0.39491748809814453,
                             -0.28444138169288635,
                             -0.18477343022823334,
                             -0.09105003625154495,
                             0.0,
                             0.07958029955625534,
                             0.16093020141124725,
                             0.24611230194568634,
                             0.33791524171829224,
                             0.44070982933044434,
                             0.5626170039176941,
                             0.7229568362236023,
                             1.0};
constexpr double kFp4[8] = {0, 0.005208333333, 0.6666667, 1, 0.33333334, 0.5, 0.16666667, 0.25};
// GGUF's IQ4_NL and IQ4_XS, by code.
constexpr double kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                             1,    13,   25,  38,  53,  69,  89,  113};

}  // namespace

double round_to(DType dtype, double v) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<double>(static_cast<float>(v));
    case DType::kBF16:
      return round_to_grid(v, 7, -126);
    case DType::kF16:
      return round_to_grid(v, 10, -14);
    default:
      std::abort();  // not a rounding that a scheme asks for
  }
}

double e4m3_round(double v) { return round_to_grid(std::clamp(v, -448.0, 448.0), 3, -6); }
std::uint8_t e4m3_code(double v) {
  const double want = std::abs(e4m3_round(v));
  // Codes are ordered like their values.
  std::uint8_t low = 0;
  std::uint8_t high = 0x7E;
  while (low < high) {
    const auto middle = static_cast<std::uint8_t>((low + high) / 2);
    if (e4m3_value(middle) < want) {
      low = static_cast<std::uint8_t>(middle + 1);
    } else {
      high = middle;
    }
  }
  if (e4m3_value(low) != want) std::abort();  // e4m3_round returned a value off the grid
  return static_cast<std::uint8_t>(low | (std::signbit(v) ? 0x80 : 0));
}

double e2m1_round(double v) { return round_to_grid(std::clamp(v, -6.0, 6.0), 1, 0); }

double element(const ConstTensorView& t, std::int64_t i) {
  switch (t.dtype) {
    case DType::kF32:
      return static_cast<double>(t.as<float>()[i]);
    case DType::kBF16: {
      const std::uint32_t bits = static_cast<std::uint32_t>(t.as<std::uint16_t>()[i]) << 16;
      float f = 0;
      std::memcpy(&f, &bits, sizeof(f));
      return static_cast<double>(f);
    }
    case DType::kF16:
      return half_value(t.as<std::uint16_t>()[i]);
    case DType::kF8E4M3:
      return e4m3_value(t.as<std::uint8_t>()[i]);
    case DType::kF8E8M0:
      return std::ldexp(1.0, t.as<std::uint8_t>()[i] - 127);
    case DType::kF4E2M1: {
      constexpr double kMagnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const int code = nibble(t, i);
      return code < 8 ? kMagnitude[code] : -kMagnitude[code - 8];
    }
    case DType::kI4:
      return nibble(t, i) < 8 ? nibble(t, i) : nibble(t, i) - 16;
    case DType::kU4:
      return nibble(t, i);
    case DType::kI8:
      return t.as<std::int8_t>()[i];
    case DType::kU8:
      return t.as<std::uint8_t>()[i];
    default:
      std::abort();  // not a dtype of weights or activations
  }
}

double table_value(CodeTable table, const ConstTensorView& t, std::int64_t i) {
  const int code = nibble(t, i);
  if (table == CodeTable::kNf4) return kNf4[code];
  if (table == CodeTable::kIq4Nl) return kIq4[code];
  return code < 8 ? kFp4[code] : -kFp4[code - 8];
}

}  // namespace moesaic::test
