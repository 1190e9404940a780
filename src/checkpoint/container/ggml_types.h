// Element types of GGUF files: which exist, and how many bytes a block of each has. What the blocks
// mean is in quant/gguf_blocks.h. Source: docs/spec/quantization.md section 13.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "moesaic/dtype.h"
#include "quant/gguf_blocks.h"

namespace moesaic::checkpoint {

struct GgmlTypeInfo {
  std::uint32_t id;
  std::string_view name;        // "Q4_K"
  std::int64_t block_elements;  // 1 for types without blocks
  std::int64_t block_bytes;
};

// Blocks of IQ1, IQ2 and IQ3: their codes index grids of vectors.
bool has_code_grid(quant::GgufType type);

// Nothing for a number that no known writer uses.
std::optional<GgmlTypeInfo> find_ggml_type(std::uint32_t id);
// Of the types without blocks.
std::optional<DType> plain_ggml_type(std::uint32_t id);
GgmlTypeInfo ggml_type_info(quant::GgufType type);  // of a known type; of others F32's

}  // namespace moesaic::checkpoint
