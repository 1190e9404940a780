// How 4-bit integers lie in a word of the image, and how they become bf16: host and device, so that
// every code is tested without a GPU. A word is the fragment of one k16 step: register i of wgmma's
// operand A has its two elements of K in nibbles i and i + 4. What is made of the bits of the codes:
// codes_integer.h.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

// Bits of `code` (0 .. 15) as element `element` of register `index`.
constexpr std::uint32_t place_int4(std::uint32_t code, int index, int element) {
  return code << (4 * index + 16 * element);
}

// The bits of the codes of the four registers, of odd ones 16 times the code: both lie in the lower byte
// of a half, so that one shift is enough.
constexpr void int4_fragment(std::uint32_t word, std::uint32_t (&a)[4]) {
  for (int i = 0; i < 4; ++i) {
    a[i] = word >> (8 * (i / 2)) & (i % 2 == 0 ? 0x000F000FU : 0x00F000F0U);
  }
}

// Zero points that are taken. (Operands would be exact up to 255.)
inline constexpr std::int32_t kLargestInt4Zero = 127;

}  // namespace moesaic::cuda
