// Images of weights with strips of scales (weight_codes.h), made once at load time.
//
// A slab of a chunk of 64 elements of K is its codes, then the strip: upper bits of scales
// [block of 64 rows: 2][unit][warp: 4][g: 8]{row g, row g + 8: 2 bytes each}, then, where the image
// has them, low bits (1 or 2 bytes each), zero points (1) and offsets (2) in the same order
// (weight_codes.h). Codes of 4
// bits lie as repack_codes.h says, with words of codes_int4.h or codes_table.h. Codes of 8 bits:
// [block: 2][half of the chunk: 2][thread: 128][16 bytes], two words of codes_bytes.h for each of
// its two k16 steps. Codes of 6 bits: [block: 2][thread: 128][16 bytes], then [block][thread][8 bytes], the
// words of codes_int6.h for two steps and two. Codes past the matrix are zero, with a scale of zero.
// Super scales, in place of upper bits and what they leave: integers plus 128
// [block][units 0 and 1, 2 and 3][warp][g]{those of row g, those of row g + 8: a byte each}, then the F16
// numbers [block][warp][g]{row g, row g + 8}.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/grouped_gemm.h"
#include "experts/sm90/repack.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

enum class CodePlaces : std::uint8_t { kInt4, kTable, kInt6, kBytes, kE4m3 };

struct CodeSource {
  CodePlaces places = CodePlaces::kInt4;
  std::uint32_t flip = 0;     // bits of a code that are stored the other way: of signed integers
  std::uint32_t mask = 0xFF;  // bits of a code
  // Row-major, low nibbles first; columns a multiple of 8.
  const std::uint8_t* weight = nullptr;
  // [rows][chunks * units]; null where the image has none.
  const std::uint16_t* upper = nullptr;
  const std::uint16_t* lower = nullptr;
  const std::uint8_t* codes = nullptr;
  const std::uint16_t* super = nullptr;  // [rows][chunks]
  bool lower_bytes = false;              // `lower` has 8 bits
  const std::uint8_t* zero = nullptr;
  const std::uint16_t* offset = nullptr;
};

// All pointers on the device; image: one expert's. Returns a cudaError_t value.
int repack_with_strips(const WeightShape& shape, const CodeImage& codes, const CodeSource& source,
                       std::byte* image, void* stream);

// FormatRow::repack. kUnsupported as make_strips says, and for experts whose scales need more bits
// than those of the first.
Status repack_code_strips(const RepackCall& call);

}  // namespace moesaic::cuda
