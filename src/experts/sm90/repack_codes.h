// Images of weights that are decoded in registers (gemm_codes.cuh), made once at load time.
//
// Thread 32 w + 4 g + t of a warpgroup has of each block of 64 rows and each k16 step a fragment of
// wgmma's operand A: register i holds row g + 8 (i % 2) and elements 16 s + 2 t + 8 (i / 2) and the
// next of the block's rows 16 w ... Which matrix row is which: repack.h. A slab of a chunk of 64
// elements of K is
//   4 bits  [block of 64 rows: 2][thread: 128][16 bytes]: a word per step (codes_e2m1.h)
//   8 bits  [block: 2][half of the steps: 2][thread: 128][16 bytes]: two words per step (codes_e4m3.h)
//   4 bits, e4m3 products: of a chunk of 128 elements, as 8 bits, with a word per row of each k32 step
//           (codes_int4_fp8.h); register i holds elements 32 s + 4 t + 16 (i / 2) and three more
// and then the strip of scales [block: 2][warp: 4][g: 8]{row g, row g + 8}, a byte per group of the
// chunk; for e4m3 products eight bytes, the multiples of the scale (codes_int4_fp8.h). Codes past
// the matrix are zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/repack.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

// All pointers on the device; image: one expert's. Each returns a cudaError_t value.
// weight [rows, columns / 2]: e2m1 codes, low nibbles first; fields [rows, columns / 32]: of
// shift_exponents. columns a multiple of 32.
int repack_e2m1(const WeightShape& shape, const std::uint8_t* weight, const std::uint8_t* fields,
                std::byte* image, void* stream);
// The same with weight [rows, columns]: e4m3 codes.
int repack_e4m3(const WeightShape& shape, const std::uint8_t* weight, const std::uint8_t* fields,
                std::byte* image, void* stream);
// weight as of repack_e2m1, scale [rows, columns / 16]: e4m3. columns a multiple of 16.
int repack_nvfp4_codes(const WeightShape& shape, const std::uint8_t* weight,
                       const std::uint8_t* scale, std::byte* image, void* stream);
// weight [rows, columns / 2]: int4 codes, low nibbles first; scale [rows, columns / group]: e4m3.
// group a multiple of 128, columns one of group.
int repack_int4_fp8_codes(const WeightShape& shape, const std::uint8_t* weight,
                          const std::uint8_t* scale, std::int64_t group, std::byte* image,
                          void* stream);

// FormatRow::repack: images, factors of rows, and static scales of operand rows or 1.
// kUnsupported: shift_exponents.
Status repack_mxfp4(const RepackCall& call);
Status repack_mxfp8(const RepackCall& call);
Status repack_nvfp4(const RepackCall& call);
Status repack_int4_fp8(const RepackCall& call);

}  // namespace moesaic::cuda
