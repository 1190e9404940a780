// How 4-bit indices of a table lie in a word of the image, and how they become bf16: host and device, so
// that every code is tested without a GPU. A word is the fragment of one k16 step: byte i is register i of
// wgmma's operand A, its two elements of K in the lower and the upper nibble. Such a byte is the place of
// both entries in a table of pairs, which a kernel makes in shared memory: 256 rows of 32 equal words, one
// for each lane, so that the lanes of a warp never meet in a bank.
#pragma once

#include <array>
#include <cstdint>

#include "experts/sm90/pick_bytes.h"

namespace moesaic::cuda {

inline constexpr int kTablePairs = 256, kTablePairBytes = 128;
inline constexpr int kTableBytes = kTablePairs * kTablePairBytes;

constexpr std::uint32_t place_index(std::uint32_t code, int index, int element) {
  return code << (8 * index + 4 * element);
}

// The 16 bf16 entries, two a word.
using WordsOfTable = std::array<std::uint32_t, 8>;
constexpr WordsOfTable words_of_table(const std::array<std::uint16_t, 16>& entries) {
  WordsOfTable words{};
  for (std::size_t c = 0; c < 16; ++c) {
    words[c / 2] |= static_cast<std::uint32_t>(entries[c]) << (16 * (c % 2));
  }
  return words;
}

constexpr std::uint32_t entry_of_table(const std::uint32_t (&words)[8], int code) {
  return words[code / 2] >> (16 * (code % 2)) & 0xFFFFU;
}
// Both entries of a byte.
constexpr std::uint32_t pair_of_table(const std::uint32_t (&words)[8], int byte) {
  return entry_of_table(words, byte & 15) | entry_of_table(words, byte >> 4) << 16;
}

// Where the pair of register `index` begins in the table: one instruction takes the byte out, one makes an
// address of it.
constexpr std::uint32_t table_offset(std::uint32_t word, int index) {
  return pick_bytes(word, 0, 0x4440U + static_cast<std::uint32_t>(index)) *
         static_cast<std::uint32_t>(kTablePairBytes);
}

}  // namespace moesaic::cuda
