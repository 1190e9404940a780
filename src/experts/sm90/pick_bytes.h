// Words taken apart and put together: host and device (nvcc takes constexpr functions for both).
#pragma once

#include <cstdint>

namespace moesaic::cuda {

// PRMT: byte i of the result is the byte of {b, a} that nibble i of the selector names; with bit 3
// of the nibble set, eight copies of its sign.
constexpr std::uint32_t pick_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
#ifdef __CUDA_ARCH__
  std::uint32_t d = 0;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
#else
  const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
  std::uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t pick = selector >> (4 * i) & 15;
    std::uint32_t byte = static_cast<std::uint32_t>(both >> (8 * (pick & 7))) & 0xFF;
    if (pick >= 8) byte = (byte & 0x80) != 0 ? 0xFF : 0;
    d |= byte << (8 * i);
  }
  return d;
#endif
}

constexpr std::uint32_t rotate_left(std::uint32_t word, int count) {
  return count == 0 ? word : word << count | word >> (32 - count);
}

// Both halves of a word that has a bf16 number in its upper half (kUpper) or its lower one. Where it
// is a factor of bf16 pairs, the multiplication selects the half itself.
template <bool kUpper>
constexpr std::uint32_t both_halves(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  std::uint32_t d = 0;
  if constexpr (kUpper) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(word));
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(word));
  }
  return d;
#else
  return pick_bytes(word, 0, kUpper ? 0x3232 : 0x1010);
#endif
}
// upper: a constant once loops are unrolled.
constexpr std::uint32_t spread_half(std::uint32_t word, int upper) {
  return upper == 0 ? both_halves<false>(word) : both_halves<true>(word);
}

}  // namespace moesaic::cuda
