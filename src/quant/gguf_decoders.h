// One block of a GGUF type into codes with scales and minima: the bytes of every type, and nothing
// of tensors. Callers use quant/gguf_blocks.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "quant/gguf_blocks.h"

namespace moesaic::quant {

// value i = scale[i / group] * code[i] - min[i / group]; the rest is left as it was. Scales and
// minima are not checked.
struct GgufBlock {
  static constexpr std::size_t kMaxElems = 256;
  static constexpr std::size_t kMaxGroups = 16;
  std::array<std::int8_t, kMaxElems> code;
  std::array<float, kMaxGroups> scale;
  std::array<float, kMaxGroups> min;
};
using GgufDecodeFn = void (*)(const std::uint8_t* bytes, GgufBlock* out);

struct GgufFormat {
  GgufTypeInfo info;
  GgufDecodeFn decode;  // null for the plain types
};
// Null for an id that this library does not read.
const GgufFormat* find_gguf_format(std::uint32_t type_id);

}  // namespace moesaic::quant
