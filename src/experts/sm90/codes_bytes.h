// How 8-bit integers lie in a word of the image, and how they become bf16: host and device, so that
// every code is tested without a GPU. A k16 step has two words; word i holds registers 2 i and
// 2 i + 1 of wgmma's operand A, whose elements of K alternate: byte (register % 2) + 2 * element.
#pragma once

#include <cstdint>

#include "experts/sm90/pick_bytes.h"

namespace moesaic::cuda {

constexpr std::uint32_t place_byte(std::uint32_t code, int index, int element) {
  return code << (8 * (index & 1) + 16 * element);
}

// The bits of the codes of the first register, or of the second.
constexpr std::uint32_t byte_pair(std::uint32_t word, int odd) {
  return pick_bytes(word, 0, odd == 0 ? 0x4240U : 0x4341U);
}

}  // namespace moesaic::cuda
