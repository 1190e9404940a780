// How e4m3 codes lie in a word of the image and become bf16, and how the scales of 4-bit and 8-bit
// microscaling weights become bf16 factors: host and device, so that every code is tested without a
// GPU.
//
// A word has two codes, of two elements of K, for each of two registers of a wgmma fragment. As bf16
// numbers, their value times 2^-120 and subnormal where it is, they are the bits of 0x87F0: S at 15,
// EEEEMMM at 10 .. 4. The first register's lie so. The bits that these leave have the second's: EEEE
// at 14 .. 11 and MMM at 2 .. 0 of their half, S at 3 of the other one, so that one rotation brings S
// and EEEE to their places and one shift MMM.
#pragma once

#include <cstdint>

#include "experts/sm90/pick_bytes.h"

namespace moesaic::cuda {

// Bits of `code` as element `element` of register `index`.
constexpr std::uint32_t place_e4m3(std::uint32_t code, int index, int element) {
  const std::uint32_t sign = code >> 7 & 1, rest = code & 0x7F;
  if (index == 0) return (sign << 15 | rest << 4) << (16 * element);
  return ((rest >> 3) << 11 | (rest & 7)) << (16 * element) | sign << (16 * (1 - element) + 3);
}

// Two registers of a fragment, as bf16 pairs of value * 2^-120, from a word. NaN excepted.
constexpr void e4m3_pairs(std::uint32_t word, std::uint32_t (&a)[2]) {
  a[0] = word & 0x87F087F0U;
  a[1] = (rotate_left(word, 28) & 0x87808780U) | (word << 4 & 0x00700070U);
}
inline constexpr std::uint32_t kE4m3Factor = (127 + 120) << 7;  // 2^120 as bf16

// The exponent field of the bf16 factor that makes value * 2^-120 into value * 2^(e8m0 - 127).
constexpr int e4m3_factor(int e8m0) { return e8m0 + 120; }
// Exponents whose factor is a bf16 number and whose products with every code are exact.
inline constexpr int kLeastE4m3Scale = 3, kLargestE4m3Scale = 134;

}  // namespace moesaic::cuda
