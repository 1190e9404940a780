// One block of each GGUF type decoded by the format's own words, in double: oracles that share
// nothing with the decoders.
#pragma once

#include <cstdint>
#include <vector>

#include "quant/gguf_blocks.h"

namespace moesaic::test {

struct GgufCase {
  quant::GgufType type;
  void (*oracle)(const std::uint8_t* block, double* values);
  std::vector<int> halves;  // offsets of f16 fields, to be kept finite
};
// Every type with blocks.
const std::vector<GgufCase>& gguf_cases();

}  // namespace moesaic::test
