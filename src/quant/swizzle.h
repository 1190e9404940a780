// Block scales in 128x4 tiles, the order in which tensor cores with block-scaled formats read them:
// a matrix [M, KS] of scale bytes (KS = K/16 for NVFP4, K/32 for MX) padded to [align(M, 128),
// align(KS, 4)] and stored tile by tile, each tile as [32][4][4] = [row % 32][row / 32][column].
// Source: the scale-factor layout of CUTLASS for block-scaled GEMMs.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

inline constexpr std::int64_t kSwizzleRows = 128;
inline constexpr std::int64_t kSwizzleCols = 4;

// Byte offset of scale (m, k) where a row of tiles has `k_tiles` = align(KS, 4) / 4 of them.
constexpr std::int64_t swizzle_offset(std::int64_t m, std::int64_t k, std::int64_t k_tiles) {
  return (m / kSwizzleRows * k_tiles + k / kSwizzleCols) * (kSwizzleRows * kSwizzleCols) +
         m % 32 * 16 + m / 32 % 4 * 4 + k % kSwizzleCols;
}

// [M, KS] or [E, M, KS] -> [align(M, 128), align(KS, 4)], with the leading E where there is one:
// each expert's matrix by itself. kInvalidShape for other ranks, kLimitExceeded.
Result<Shape> swizzled_shape(const Shape& scales);

// scales: elements of one byte (F8_E4M3, F8_E8M0, U8), row-major; swizzled: the same dtype, the
// shape above. Padding is written as 0. Both contiguous, disjoint. Errors: shapes, dtypes, layout,
// aliasing.
Status swizzle_block_scales(ConstTensorView scales, TensorView swizzled);
// The inverse; what lies in the padding is ignored.
Status unswizzle_block_scales(ConstTensorView swizzled, TensorView scales);

// Activations of a grouped GEMM: the scales of expert e's rows[e] rows begin at scale row
// first[e] = sum over i < e of align(rows[i], 128); first[E] is the number of scale rows in all.
//   rows [E] I32, >= 0;  first [E + 1] I32
// kInvalidArgument names a negative count, kLimitExceeded a sum beyond 2^31 - 1.
Status block_scale_offsets(ConstTensorView rows, TensorView first);

}  // namespace moesaic
