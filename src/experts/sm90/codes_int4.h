// How 4-bit integers lie in a word of the image, and how they become bf16: host and device, so that
// every code is tested without a GPU. A word is the fragment of one k16 step: register i of wgmma's
// operand A has its two elements of K in nibbles i and i + 4. Under the bits of 128 a nibble is a
// bf16 number, 128 + code; adding minus (128 + zero point) leaves an exact integer.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

// Bits of `code` (0 .. 15) as element `element` of register `index`.
constexpr std::uint32_t place_int4(std::uint32_t code, int index, int element) {
  return code << (4 * index + 16 * element);
}

// The four registers, as bf16 pairs of 128 + code.
inline constexpr std::uint32_t kInt4Bits = 0x43004300U;
constexpr void int4_fragment(std::uint32_t word, std::uint32_t (&a)[4],
                             std::uint32_t bits = kInt4Bits) {
  for (int i = 0; i < 4; ++i) a[i] = (word >> (4 * i) & 0x000F000FU) | bits;
}

// The bf16 bits of -(128 + zero), for zero points of at most kLargestInt4Zero.
inline constexpr std::int32_t kLargestInt4Zero = 127;
constexpr std::uint32_t int4_addend(std::uint32_t zero) { return 0xC300U | zero; }

}  // namespace moesaic::cuda
