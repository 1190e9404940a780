// How 8-bit codes lie in a word of the image, and how they become bf16: host and device, so that
// every code is tested without a GPU. A k16 step has two words; word i holds registers 2 i and
// 2 i + 1 of wgmma's operand A, whose elements of K alternate: byte (register % 2) + 2 * element.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

constexpr std::uint32_t place_byte(std::uint32_t code, int index, int element) {
  return code << (8 * (index & 1) + 16 * element);
}

// Integers u from 0 to 255 as u - 128: bf16 cannot hold 128 and 8 bits more, so the low 7 are put
// under the bits of 128, and the highest picks what is added: -128 or -256. The sum is exact.
struct Int8Pair {
  std::uint32_t value, addend;
};
constexpr Int8Pair int8_pair(std::uint32_t word, int odd) {
  const std::uint32_t w = word >> (8 * odd);
  return {(w & 0x007F007FU) | 0x43004300U, (w & 0x00800080U) ^ 0xC380C380U};
}

// e4m3 codes, NaN excepted, as value * 2^-120: the exponent's bias differs by that.
constexpr std::uint32_t e4m3_pair(std::uint32_t word, int odd) {
  const std::uint32_t sign = odd != 0 ? word : word << 8, rest = odd != 0 ? word >> 4 : word << 4;
  return (sign & 0x80008000U) | (rest & 0x07F007F0U);
}
inline constexpr std::uint32_t kE4m3Factor = (127 + 120) << 7;  // 2^120 as bf16

}  // namespace moesaic::cuda
