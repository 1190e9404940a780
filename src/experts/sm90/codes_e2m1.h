// How e2m1 codes lie in a word of the image, and how they become bf16: host and device, so that
// every code is tested without a GPU.
//
// A word has two codes, of two elements of K, for each of the four registers of a wgmma fragment. As
// bf16 numbers, their value times 2^-126 and subnormal where EE is 0, they are the bits of 0x81C0: S
// at 15, EEM at 8 .. 6. Three registers' are found there after rotations by 0, 10 and 13. Of the
// fourth's the rotations leave four bits of each half, from which one product, a sum of three
// shifted copies that do not meet where a bit is wanted, brings them there: S from 1, the upper E
// from 0, the lower E from 4, M from 3.
#pragma once

#include <cstdint>

#include "experts/sm90/pick_bytes.h"

namespace moesaic::cuda {

inline constexpr std::uint32_t kE2m1Mask = 0x81C081C0U;

constexpr int e2m1_rotation(int index) { return index == 0 ? 0 : 7 + 3 * index; }
inline constexpr std::uint32_t kE2m1Fourth = 0x001B001BU;
inline constexpr std::uint32_t kE2m1Shifts = 1U << 14 | 1U << 8 | 1U << 3;

// The bits of the codes of a register's lower and upper half in the word.
constexpr std::uint32_t place_e2m1(std::uint32_t lower, std::uint32_t upper, int index) {
  const auto spread = [index](std::uint32_t code) {
    const std::uint32_t sign = code >> 3 & 1, rest = code & 7;
    if (index < 3) return sign << 15 | rest << 6;
    return sign << 1 | rest >> 2 | (rest >> 1 & 1) << 4 | (rest & 1) << 3;
  };
  const std::uint32_t both = spread(lower) | spread(upper) << 16;
  return index < 3 ? rotate_left(both, (32 - e2m1_rotation(index)) % 32) : both;
}

// The four registers of a fragment, as bf16 pairs of value * 2^-126, from a word.
constexpr void e2m1_fragment(std::uint32_t word, std::uint32_t (&a)[4]) {
  a[0] = word & kE2m1Mask;
  a[1] = rotate_left(word, e2m1_rotation(1)) & kE2m1Mask;
  a[2] = rotate_left(word, e2m1_rotation(2)) & kE2m1Mask;
  a[3] = (word & kE2m1Fourth) * kE2m1Shifts & kE2m1Mask;
}

// The exponent field of the bf16 factor that makes value * 2^-126 into value * 2^(e8m0 - 127).
constexpr int e2m1_factor(int e8m0) { return e8m0 + 126; }
// Exponents whose factor is a bf16 number and whose products with every code are exact.
inline constexpr int kLeastE2m1Scale = -5, kLargestE2m1Scale = 128;

}  // namespace moesaic::cuda
