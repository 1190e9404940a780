// Weights in the order in which the grouped-GEMM kernel streams them, made once at load time.
//
// Image of one expert: [band][chunk][slab][128 rows][128 bytes]; a band is 256 matrix rows, a chunk
// 128 bytes of K, a slab the 128 rows of one consumer group. Inside a slab the 16-byte pieces of
// row r are at piece ^ (r & 7), which is the 128-byte swizzle of wgmma operands. Rows and columns
// past the matrix are zero. Row r of a slab (block = r / 64, w = r % 64 / 16, hi = r % 16 / 8, g =
// r % 8):
//   plain   matrix row  256 band + 128 slab + 32 w + 4 g + 2 block + hi
//   gated   channel c = 128 band + 64 slab + 16 w + 2 g + block: its gate row (hi = 0) or up row
// so that an accumulator fragment holds gate and up of one channel, and neighbouring channels.
// The layout is internal to a build: never stored.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic::cuda {

struct RepackShape {
  std::int64_t rows = 0;     // of the canonical matrix: 2I or I, or H
  std::int64_t columns = 0;  // K, elements
  std::int64_t element_bytes = 1;
  bool gated = false;  // rows are I gate rows, then I up rows

  constexpr std::int64_t row_bytes() const { return columns * element_bytes; }
  constexpr std::int64_t chunks() const { return (row_bytes() + 127) / 128; }
  constexpr std::int64_t slabs() const { return gated ? (rows / 2 + 63) / 64 : (rows + 127) / 128; }
  constexpr std::int64_t bands() const { return (slabs() + 1) / 2; }
  constexpr std::int64_t image_bytes() const { return bands() * chunks() * 32768; }
  constexpr std::int64_t scale_bytes() const { return bands() * chunks() * 16; }
};

// All pointers on the device. weight [rows, columns] row-major, 16-byte aligned, row_bytes a
// multiple of 16; scale [ceil(rows/128), ceil(columns/128)] F32 or null (gated: rows / 2 is then a
// multiple of 128). image and image_scale: one expert's. Returns a cudaError_t value.
int repack_expert(const RepackShape& shape, const std::byte* weight, const float* scale,
                  std::byte* image, float* image_scale, void* stream);

}  // namespace moesaic::cuda
