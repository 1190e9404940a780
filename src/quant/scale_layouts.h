// Layouts of per-group scales for FP8 GEMMs with TMA loads (DeepGEMM): column-major with padded
// columns, and four power-of-two scales per 32-bit word. Values do not change, only places.
// Source: spec of DeepGEMM's "required layouts".
//
// A matrix of scales [M, G] (rows or row blocks by groups along K), rank 2, or [E, M, G]. "Aligned"
// rows are align(M, 4): a column of 4-byte elements then begins on 16 bytes, as TMA requires.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// align(rows, 16 / element_bytes) for elements of 1, 2, 4, 8 or 16 bytes.
constexpr std::int64_t tma_aligned_rows(std::int64_t rows, std::int64_t element_bytes) {
  const std::int64_t step = 16 / element_bytes;
  return (rows + step - 1) / step * step;
}

// --- fp32, column-major
// ---------------------------------------------------------------------------

// Shape of the storage: [G, align(M, 4)] F32, with the leading E where there is one. Column g of
// the scales is row g of the storage; strides of the scales inside are (1, align(M, 4)).
Result<Shape> column_major_shape(const Shape& scales);
// scales [.., M, G] F32 <-> storage F32. Padded rows are written as 0 and ignored when read.
Status to_column_major(ConstTensorView scales, TensorView storage);
Status from_column_major(ConstTensorView storage, TensorView scales);

// --- UE8M0, four per word, column-major
// -----------------------------------------------------------

// Shape of the storage: [ceil(G/4), align(M, 4)] I32, with the leading E. The byte of (m, g) is
// byte g % 4 (0 = lowest) of word (g / 4, m).
Result<Shape> packed_ue8m0_shape(const Shape& scales);
// scales: F32 powers of two, F8_E8M0 or U8 exponent bytes, [.., M, G]. An F32 that is not a power
// of two from 2^-126 to 2^127 (sign and mantissa 0) or a byte 0xFF is kInvalidArgument, naming its
// place: requantise instead of cutting a mantissa. Missing groups and padded rows are 0 bytes.
Status pack_ue8m0(ConstTensorView scales, TensorView storage);
// To F32 or to exponent bytes (F8_E8M0 or U8).
Status unpack_ue8m0(ConstTensorView storage, TensorView scales);

// --- weights
// ---------------------------------------------------------------------------------------

// Row-block scales [.., ceil(N/block_n), G] to one row each: out[n, g] = scales[n / block_n, g],
// elements copied as they are (any dtype of 1 or 4 bytes, both sides the same). out [.., N, G]. The
// step before pack_ue8m0 for weights. Its inverse is collapse_row_blocks, which refuses
// (kInvalidArgument) rows of a block that differ.
Status expand_row_blocks(ConstTensorView scales, std::int64_t block_n, TensorView out);
Status collapse_row_blocks(ConstTensorView rows, std::int64_t block_n, TensorView out);

}  // namespace moesaic
