// How 4-bit indices of a table lie in a word of the image, and how they become bf16: host and
// device, so that every code is tested without a GPU. A word is the fragment of one k16 step;
// number n = 2 * register + element has the low three bits of its code in nibble n, where PRMT
// looks up eight bytes, and its highest bit at the top of nibble 2 n + 1 (n < 4) or 2 n - 8, where
// a byte's sign says which half of the table it is.
#pragma once

#include <array>
#include <cstdint>

#include "experts/sm90/pick_bytes.h"

namespace moesaic::cuda {

constexpr std::uint32_t place_index(std::uint32_t code, int index, int element) {
  const int n = 2 * index + element, top = n < 4 ? 2 * n + 1 : 2 * n - 8;
  return (code & 7) << (4 * n) | (code >> 3) << (4 * top + 3);
}

// Low bytes of the 16 bf16 entries, four a word, then their high bytes.
using BytesOfTable = std::array<std::uint32_t, 8>;
constexpr BytesOfTable bytes_of_table(const std::array<std::uint16_t, 16>& entries) {
  BytesOfTable bytes{};
  for (std::size_t c = 0; c < 16; ++c) {
    bytes[c / 4] |= static_cast<std::uint32_t>(entries[c] & 0xFF) << (8 * (c % 4));
    bytes[4 + c / 4] |= static_cast<std::uint32_t>(entries[c] >> 8) << (8 * (c % 4));
  }
  return bytes;
}

// The four registers, as bf16 pairs of entries.
constexpr void table_fragment(std::uint32_t word, const std::uint32_t (&table)[8],
                              std::uint32_t (&a)[4]) {
  const std::uint32_t low = word & 0x77777777U;
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t pick = half == 0 ? low & 0xFFFFU : low >> 16;
    const std::uint32_t upper = pick_bytes(half == 0 ? word : word << 4, 0, 0xBA98U);
    std::uint32_t bytes[2] = {};
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t first = pick_bytes(table[4 * i], table[4 * i + 1], pick);
      const std::uint32_t second = pick_bytes(table[4 * i + 2], table[4 * i + 3], pick);
      bytes[i] = (first & ~upper) | (second & upper);
    }
    a[2 * half] = pick_bytes(bytes[0], bytes[1], 0x5140U);
    a[2 * half + 1] = pick_bytes(bytes[0], bytes[1], 0x7362U);
  }
}

}  // namespace moesaic::cuda
