// Images of 4-bit weights that are decoded in registers (gemm_codes.cuh), made once at load time.
//
// A slab of a chunk of 64 elements of K is [block of 64 rows: 2][thread: 128][16 bytes], then the
// strip of scales [block: 2][warp: 4][g: 8]{row g: 2 bytes, row g + 8: 2 bytes}. Thread 32 w + 4 g
// + t has of each k16 step s one word: the fragment of wgmma's operand A, whose register i holds
// row g + 8 (i % 2) and elements 16 s + 2 t + 8 (i / 2) and the next of the block's rows 16 w ...
// Which matrix row is which: repack.h. Codes past the matrix are zero, with a factor of zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/sm90/repack.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

// weight [rows, columns / 2]: e2m1 codes, low nibbles first; scale [rows, columns / 32]: E8M0, at
// most kLargestE2m1Scale. columns a multiple of 32. All pointers on the device; image: one
// expert's. Returns a cudaError_t value.
int repack_e2m1(const WeightShape& shape, const std::uint8_t* weight, const std::uint8_t* scale,
                std::byte* image, void* stream);

// FormatRow::repack. kUnsupported for a scale above 2, which has no bf16 factor.
Status repack_mxfp4(const RepackCall& call);

}  // namespace moesaic::cuda
