// Floating formats of 16, 8 and 4 bits: encode from and decode to fp32, one value at a time.
//
// Encoding rounds to nearest, ties to even, onto the format's grid including its subnormals, in
// integer arithmetic: neither the rounding mode nor flush-to-zero of the caller can change a bit.
//   bf16, f16         overflow and infinity become infinity, NaN stays NaN (quiet, payload cut)
//   e4m3, e5m2, e2m1  overflow and infinity saturate to the largest finite value; NaN is documented
//                     as "unspecified but finite" and becomes +largest, as fmax(-L, fmin(x, L))
//                     does
// Decoding is exact. Formats: OCP 8-bit floating point and OCP microscaling (MX) v1.0.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/fault.h"

namespace moesaic {

inline constexpr float kE4m3Max = 448.0F;
inline constexpr float kE5m2Max = 57344.0F;
inline constexpr float kE2m1Max = 6.0F;
inline constexpr float kF16Max = 65504.0F;

namespace detail {

// Read once at start-up, so that fault builds do not look at the environment for each element.
inline const bool kFaultTiesAway = MOESAIC_FAULT(numerics_ties_away);
inline const bool kFaultFlushSubnormals = MOESAIC_FAULT(numerics_flush_subnormals);
inline const bool kFaultE2m1SignBit = MOESAIC_FAULT(numerics_e2m1_drop_sign);

inline constexpr std::uint32_t kF32AbsMask = 0x7FFFFFFFU;
inline constexpr std::uint32_t kF32Infinity = 0x7F800000U;

// Code (without sign) of the grid point nearest to the finite or infinite fp32 magnitude
// `abs_bits`, on a grid with kMantissaBits stored mantissa bits and exponent bias kBias that never
// ends at the top; the caller treats codes past its largest finite one.
template <int kMantissaBits, int kBias>
inline std::uint32_t encode_magnitude(std::uint32_t abs_bits) {
  // Biased fp32 exponent of the format's smallest normal number, 2^(1 - kBias).
  constexpr int kMinNormal = 128 - kBias;
  const int exponent = std::max(static_cast<int>(abs_bits >> 23), 1);
  const std::uint32_t hidden = abs_bits >= 0x00800000U ? 0x00800000U : 0U;
  const std::uint32_t significand = (abs_bits & 0x007FFFFFU) | hidden;
  // Bits to drop: the width difference, and one more for each binade below the smallest normal.
  const int drop = 23 - kMantissaBits + std::max(kMinNormal - exponent, 0);
  // significand < 2^24, so from 25 dropped bits on the value is below half a step.
  if (drop > 24) return 0;
  if (detail::kFaultFlushSubnormals && exponent < kMinNormal) return 0;
  const std::uint32_t odd = detail::kFaultTiesAway ? 1U : (significand >> drop) & 1U;
  const std::uint32_t rounded = (significand + (1U << (drop - 1)) - 1U + odd) >> drop;
  // A normal's hidden bit counts as one step of the exponent field; rounding up to the next binade
  // carries by itself.
  const int steps = std::max(exponent, kMinNormal) - kMinNormal;
  return (static_cast<std::uint32_t>(steps) << kMantissaBits) + rounded;
}

// Encode with saturation to kMaxCode (largest finite code) and kSignBit above it.
template <int kMantissaBits, int kBias, std::uint32_t kMaxCode, std::uint32_t kSignBit>
inline std::uint8_t encode_saturating(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & kF32AbsMask;
  if (magnitude > kF32Infinity) return static_cast<std::uint8_t>(kMaxCode);  // NaN
  const std::uint32_t code = std::min(encode_magnitude<kMantissaBits, kBias>(magnitude), kMaxCode);
  return static_cast<std::uint8_t>(code | ((bits >> 31) != 0 ? kSignBit : 0U));
}

// 2^exponent for a normal fp32 result.
constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// Value of an unsigned code with kMantissaBits and kBias, special codes not considered.
template <int kMantissaBits, int kBias>
constexpr float decode_magnitude(std::uint32_t code) {
  const std::uint32_t mantissa = code & ((1U << kMantissaBits) - 1U);
  const int exponent = static_cast<int>(code >> kMantissaBits);
  const std::uint32_t significand = exponent == 0 ? mantissa : mantissa | (1U << kMantissaBits);
  // Both factors and the product are exact: few bits, exponents well inside fp32's range.
  return static_cast<float>(significand) *
         power_of_two(std::max(exponent, 1) - kBias - kMantissaBits);
}

// How a code table marks its non-numbers.
enum class Specials { kNone, kE4m3fn, kIeee, kFnuz };

template <int kMantissaBits, int kBias, int kBits, Specials kSpecials>
constexpr std::array<float, std::size_t{1} << kBits> make_decode_table() {
  constexpr std::uint32_t kSign = 1U << (kBits - 1);
  constexpr std::uint32_t kInfinity = kSign - (1U << kMantissaBits);
  std::array<float, std::size_t{1} << kBits> table{};
  for (std::uint32_t code = 0; code < 2 * kSign; ++code) {
    const std::uint32_t magnitude = code & (kSign - 1U);
    float value = decode_magnitude<kMantissaBits, kBias>(magnitude);
    if (kSpecials == Specials::kE4m3fn && magnitude == kSign - 1U) {
      value = std::numeric_limits<float>::quiet_NaN();
    } else if (kSpecials == Specials::kIeee && magnitude >= kInfinity) {
      value = magnitude == kInfinity ? std::numeric_limits<float>::infinity()
                                     : std::numeric_limits<float>::quiet_NaN();
    } else if (kSpecials == Specials::kFnuz && code == kSign) {
      value = std::numeric_limits<float>::quiet_NaN();
    }
    table[code] = (code & kSign) != 0 ? -value : value;
  }
  return table;
}

inline constexpr auto kE4m3Table = make_decode_table<3, 7, 8, Specials::kE4m3fn>();
inline constexpr auto kE5m2Table = make_decode_table<2, 15, 8, Specials::kIeee>();
inline constexpr auto kE4m3FnuzTable = make_decode_table<3, 8, 8, Specials::kFnuz>();
inline constexpr auto kE5m2FnuzTable = make_decode_table<2, 16, 8, Specials::kFnuz>();
inline constexpr auto kE2m1Table = make_decode_table<1, 1, 4, Specials::kNone>();

}  // namespace detail

// --- 16 bits -------------------------------------------------------------------------------------

inline std::uint16_t bf16_from_f32(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & detail::kF32AbsMask;
  if (magnitude > detail::kF32Infinity) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x0040U);  // keep NaN, make it quiet
  }
  return static_cast<std::uint16_t>(sign | detail::encode_magnitude<7, 127>(magnitude));
}
constexpr float f32_from_bf16(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

inline std::uint16_t f16_from_f32(float x) {
  constexpr std::uint32_t kInfinity = 0x7C00U;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & detail::kF32AbsMask;
  if (magnitude > detail::kF32Infinity) {
    return static_cast<std::uint16_t>(sign | 0x7E00U | ((magnitude >> 13) & 0x01FFU));
  }
  return static_cast<std::uint16_t>(
      sign | std::min(detail::encode_magnitude<10, 15>(magnitude), kInfinity));
}
constexpr float f32_from_f16(std::uint16_t code) {
  const std::uint32_t magnitude = code & 0x7FFFU;
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x8000U) << 16;
  if (magnitude >= 0x7C00U) {  // infinity and NaN: the exponent field of fp32 full, payload kept
    return std::bit_cast<float>(sign | detail::kF32Infinity | ((magnitude & 0x03FFU) << 13));
  }
  const float value = detail::decode_magnitude<10, 15>(magnitude);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

// --- 8 and 4 bits --------------------------------------------------------------------------------

inline std::uint8_t e4m3_from_f32(float x) {
  return detail::encode_saturating<3, 7, 0x7EU, 0x80U>(x);
}
constexpr float f32_from_e4m3(std::uint8_t code) { return detail::kE4m3Table[code]; }

// Read, never written, as the variants below.
constexpr float f32_from_e5m2(std::uint8_t code) { return detail::kE5m2Table[code]; }

// Codes 0..15; only the low four bits of a code are looked at when decoding. A negative value that
// rounds to zero keeps its sign (code 8, -0).
inline std::uint8_t e2m1_from_f32(float x) {
  const std::uint8_t code = detail::encode_saturating<1, 1, 0x7U, 0x8U>(x);
  return detail::kFaultE2m1SignBit ? static_cast<std::uint8_t>(code & 0x7U) : code;
}
constexpr float f32_from_e2m1(std::uint8_t code) { return detail::kE2m1Table[code & 0xFU]; }

// The fnuz variants (one zero, no infinity, NaN = 0x80, bias one larger) are read, never written.
constexpr float f32_from_e4m3fnuz(std::uint8_t code) { return detail::kE4m3FnuzTable[code]; }
constexpr float f32_from_e5m2fnuz(std::uint8_t code) { return detail::kE5m2FnuzTable[code]; }

}  // namespace moesaic
