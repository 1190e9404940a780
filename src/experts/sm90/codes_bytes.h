// How 8-bit integers lie in a word of the image, and how they become bf16: host and device, so that
// every code is tested without a GPU. A k16 step has two words; word i holds registers 2 i and
// 2 i + 1 of wgmma's operand A, whose elements of K alternate: byte (register % 2) + 2 * element.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

constexpr std::uint32_t place_byte(std::uint32_t code, int index, int element) {
  return code << (8 * (index & 1) + 16 * element);
}

// Integers u from 0 to 255 as u - 128: bf16 cannot hold 128 and 8 bits more, so the low 7 are put
// under the bits of 128, and the highest picks what is taken away: 128 or 256. The difference is
// exact.
struct Int8Pair {
  std::uint32_t value, away;
};
inline constexpr std::uint32_t kInt8Bits = 0x43004300U;
constexpr Int8Pair int8_pair(std::uint32_t word, int odd, std::uint32_t bits = kInt8Bits) {
  const std::uint32_t w = word >> (8 * odd);
  return {(w & 0x007F007FU) | bits, (~w & 0x00800080U) | bits};
}

}  // namespace moesaic::cuda
