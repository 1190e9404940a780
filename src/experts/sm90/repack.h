// Weights in the order in which the grouped-GEMM kernel streams them, made once at load time.
//
// Image of one expert: [band][chunk][slab], bands, chunks and slabs as grouped_gemm.h defines them.
// Where weights are operands as they lie (FromShared) a slab is [128 rows][128 bytes]: inside it
// the 16-byte pieces of row r are at piece ^ (r & 7), which is the 128-byte swizzle of wgmma
// operands. Rows and columns past the matrix are zero. Row r of a slab (block = r / 64, w = r % 64
// / 16, hi = r % 16 / 8, g = r % 8):
//   plain   matrix row  256 band + 128 slab + 32 w + 4 g + 2 block + hi
//   gated   channel c = 128 band + 64 slab + 16 w + 2 g + block: its gate row (hi = 0) or up row
// so that an accumulator fragment holds gate and up of one channel, and neighbouring channels.
// The layout is internal to a build: never stored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moesaic/status.h"

namespace moesaic::cuda {

struct RepackShape {
  std::int64_t rows = 0;           // of the canonical matrix: 2I or I, or H
  std::int64_t columns = 0;        // K, elements
  std::int64_t element_bytes = 1;  // of the operand rows that multiply it
  bool gated = false;              // rows are I gate rows, then I up rows

  constexpr std::int64_t row_bytes() const { return columns * element_bytes; }
  constexpr std::int64_t chunks() const { return (row_bytes() + 127) / 128; }
  constexpr std::int64_t slabs() const { return gated ? (rows / 2 + 63) / 64 : (rows + 127) / 128; }
  constexpr std::int64_t bands() const { return (slabs() + 1) / 2; }
  // Block scales: four floats per band and chunk.
  constexpr std::int64_t scale_bytes() const { return bands() * chunks() * 16; }
};

// The same with what the format puts into the image.
struct WeightShape : RepackShape {
  std::int64_t slab_bytes = 0;  // of a chunk

  constexpr std::int64_t band_bytes() const { return 2 * slab_bytes; }
  constexpr std::int64_t image_bytes() const { return bands() * chunks() * band_bytes(); }
};

// Weights of element_bytes each. All pointers on the device. weight [rows, columns] row-major,
// 16-byte aligned, row_bytes a multiple of 16; scale [ceil(rows/128), ceil(columns/128)] F32 or
// null (gated: rows / 2 is then a multiple of 128). image and image_scale: one expert's. Returns a
// cudaError_t value.
int repack_expert(const RepackShape& shape, const std::byte* weight, const float* scale,
                  std::byte* image, float* image_scale, void* stream);

struct RepackCall;
// FormatRow::repack of the formats with such images, with and without block scales.
Status repack_tiles(const RepackCall& call);
// Of the formats with a scale per row: images of one byte per weight, scales of all rows (one for a
// matrix is repeated), static scales of operand rows or 1.
Status repack_row_scaled(const RepackCall& call);

}  // namespace moesaic::cuda
