// How 6-bit integers lie in the words of the image, and how they become bf16: host and device, so that
// every code is tested without a GPU. Two neighbouring k16 steps, eight registers of wgmma's operand A,
// have three words; each half of a word belongs to one element of K. Bits 0 .. 5 and 6 .. 11 of the
// halves are the codes of registers 0 to 5 in turn, bits 12 .. 15 of the first and the third word the
// lower four bits of registers 6 and 7, and those of the second one their upper two. What is made of
// the bits of the codes: codes_integer.h.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

inline constexpr int kInt6Words = 3;  // of two steps

// Adds `code` (0 .. 63) to the words of its two steps, as element `element` of register `index` (0 .. 7).
constexpr void place_int6(std::uint32_t code, int index, int element, std::uint32_t* words) {
  const int half = 16 * element;
  if (index < 6) {
    words[index / 2] |= code << (half + 6 * (index % 2));
    return;
  }
  words[index == 6 ? 0 : 2] |= (code & 15) << (half + 12);
  words[1] |= (code >> 4) << (half + (index == 6 ? 12 : 14));
}

// The bits of the codes of the four registers of the first step (odd == 0) or of the second.
constexpr void int6_fragment(const std::uint32_t (&words)[kInt6Words], int odd,
                             std::uint32_t (&a)[4]) {
  constexpr std::uint32_t kCode = 0x003F003FU, kLow = 0x000F000FU, kHigh = 0x00300030U;
  for (int i = 0; i < 4; ++i) {
    const int index = 4 * odd + i;
    if (index < 6) {
      a[i] = words[index / 2] >> (6 * (index % 2)) & kCode;
    } else {
      const std::uint32_t low = words[index == 6 ? 0 : 2] >> 12 & kLow;
      a[i] = (words[1] >> (index == 6 ? 8 : 10) & kHigh) | low;
    }
  }
}

}  // namespace moesaic::cuda
