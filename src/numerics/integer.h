// Integer element formats: int8, packed int4/uint4 nibbles, code tables of nf4 and IQ4_NL.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/fault.h"

namespace moesaic {

// Nearest integer, ties to even, saturating to [-128, 127]; NaN gives 0. Integer rounding by the
// 1.5 * 2^23 addition, exact for the clamped range under the default rounding mode.
inline std::int8_t i8_from_f32(float x) {
  if (x != x) return 0;
  const float clamped = x < -128.0F ? -128.0F : (x > 127.0F ? 127.0F : x);
  constexpr float kMagic = 12582912.0F;
  return static_cast<std::int8_t>((clamped + kMagic) - kMagic);
}

// Packed nibbles, element 2j in the low and 2j+1 in the high half of byte j.
inline std::uint8_t nibble_at(const std::uint8_t* packed, std::int64_t index) {
  const bool high = (index & 1) != 0;
  const std::uint8_t byte = packed[index >> 1];
  return static_cast<std::uint8_t>(high != MOESAIC_FAULT(numerics_nibble_order) ? byte >> 4
                                                                                : byte & 0x0F);
}
// Writes the low four bits of `value`; the neighbouring nibble stays.
inline void set_nibble(std::uint8_t* packed, std::int64_t index, std::uint8_t value) {
  std::uint8_t& byte = packed[index >> 1];
  const unsigned low = value & 0x0FU;
  byte = static_cast<std::uint8_t>((index & 1) != 0 ? (byte & 0x0FU) | (low << 4)
                                                    : (byte & 0xF0U) | low);
}

// A nibble in two's complement, [-8, 7].
constexpr int i4_from_nibble(std::uint8_t nibble) { return ((nibble & 0x0F) ^ 8) - 8; }

// nf4: quantiles of the normal distribution, in units of a block's absmax. Source: QLoRA,
// Dettmers et al. 2023, appendix E.
inline constexpr std::array<float, 16> kNf4Values = {
    -1.0F,
    -0.6961928009986877F,
    -0.5250730514526367F,
    -0.39491748809814453F,
    -0.28444138169288635F,
    -0.18477343022823334F,
    -0.09105003625154495F,
    0.0F,
    0.07958029955625534F,
    0.16093020141124725F,
    0.24611230194568634F,
    0.33791524171829224F,
    0.44070982933044434F,
    0.5626170039176941F,
    0.7229568362236023F,
    1.0F,
};
// Nearest entry of x = value / absmax; a value exactly between two entries takes the lower one. NaN
// gives 0. Stored bytes hold element 0 in the *high* nibble, unlike every other format here.
constexpr std::uint8_t nf4_from_f32(float x) {
  std::uint8_t code = 0;
  for (std::size_t i = 0; i + 1 < kNf4Values.size(); ++i) {
    const double midpoint =
        0.5 * (static_cast<double>(kNf4Values[i]) + static_cast<double>(kNf4Values[i + 1]));
    if (static_cast<double>(x) > midpoint) code = static_cast<std::uint8_t>(i + 1);
  }
  return code;
}

// IQ4_NL and IQ4_XS of GGUF: non-linear steps of a block's scale. Exact in bf16. Source: the
// format's table, kvalues_iq4nl of ggml.
inline constexpr std::array<std::int8_t, 16> kIq4NlValues = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
};
// The code of an entry of the table. Of other numbers: of the nearest entry above, or the last.
constexpr std::uint8_t iq4nl_from_entry(std::int8_t entry) {
  std::uint8_t code = 0;
  while (code < 15 && kIq4NlValues[code] < entry) ++code;
  return code;
}

}  // namespace moesaic
