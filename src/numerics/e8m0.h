// E8M0: a byte that is a power of two, used as a shared scale; and the three rules found in the
// field for choosing it from a block's largest magnitude (amax). They give different bytes: a
// scheme names one. Source: OCP microscaling (MX) v1.0 for the format and the floor rule.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/fault.h"

namespace moesaic {

inline constexpr std::uint8_t kE8m0Nan = 0xFF;
inline constexpr std::uint8_t kE8m0Max = 0xFE;  // 2^127

// 2^(code - 127), exact (code 0 is the fp32 subnormal 2^-127); 0xFF is NaN.
constexpr float f32_from_e8m0(std::uint8_t code) {
  if (code == kE8m0Nan) return std::numeric_limits<float>::quiet_NaN();
  const std::uint32_t bits = code == 0 ? 0x00400000U : static_cast<std::uint32_t>(code) << 23;
  return std::bit_cast<float>(bits);
}

// Smallest power of two >= scale. 0 gives 0x00, infinity and anything past 2^127 give 0xFE, NaN
// (or a negative number, which is no scale) gives 0xFF. A scale in (0, 2^-127] gives 0x01, not
// 0x00: consumers that build fp32 by shifting read byte 0 as 0.0 and would lose the block.
inline std::uint8_t e8m0_from_scale_ceil(float scale) {
  if (!(scale >= 0.0F)) return kE8m0Nan;
  const auto bits = std::bit_cast<std::uint32_t>(scale) & 0x7FFFFFFFU;
  const std::uint32_t up =
      (bits & 0x007FFFFFU) != 0 && !MOESAIC_FAULT(numerics_e8m0_truncate) ? 1U : 0U;
  return static_cast<std::uint8_t>(std::min((bits >> 23) + up, std::uint32_t{kE8m0Max}));
}

// CEIL: amax / qmax (448 for e4m3, 6 for e2m1) rounded up; no element ever saturates.
inline std::uint8_t e8m0_scale_ceil(float amax, float qmax) {
  return e8m0_from_scale_ceil(amax / qmax);
}

// OCP-floor: floor(log2 amax) - emax of the element format (8 for e4m3, 2 for e2m1). Elements above
// the format's largest value times the scale saturate. 0 and everything too small give 0x00.
inline std::uint8_t e8m0_scale_ocp_floor(float amax, int emax_elem) {
  if (!(amax >= 0.0F)) return kE8m0Nan;
  const auto exponent = static_cast<int>(std::bit_cast<std::uint32_t>(amax) >> 23) & 0xFF;
  return static_cast<std::uint8_t>(std::clamp(exponent - emax_elem, 0, int{kE8m0Max}));
}

// ROUND@1.75: amax rounded to a power of two, up from 1.75 * 2^k, then as OCP-floor; saturates only
// for amax in (1.5, 1.75) * 2^k. 0 gives 0x00. For e2m1 the offset is 2, for e4m3 8.
inline std::uint8_t e8m0_scale_round_1_75(float amax, int emax_elem = 2) {
  if (!(amax >= 0.0F)) return kE8m0Nan;
  const std::uint32_t rounded = (std::bit_cast<std::uint32_t>(amax) & 0x7FFFFFFFU) + (1U << 21);
  const auto exponent = static_cast<int>(rounded >> 23);
  return static_cast<std::uint8_t>(std::clamp(exponent - emax_elem, 0, int{kE8m0Max}));
}

}  // namespace moesaic
