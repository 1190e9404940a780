// Orders in which kernels of other engines read quantised weights and scales. Every function changes
// places only, never a value, and has its inverse; Moesaic's own kernels keep private layouts and
// read none of these. All tensors are contiguous, inputs and outputs do not overlap
// (kInvalidLayout, kAliasing), and the result is deterministic.
#pragma once

#include <array>
#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// --- Integer weights in Marlin's order
// Read by: Marlin's GEMM and MoE kernels (4 and 8 bits). Tiles of 16 x 64, permuted so that each
// lane's values for a half-precision MMA lie together. K and N here are those of a linear, weight
// [N, K]; Marlin's own matrices are [K, N]. Source: Marlin (Frantar et al. 2024).

// Place p of a chunk of 1024 values (4 tiles of 16 x 16, each row-major) holds value perm[p] of it.
// bits: 4 or 8.
std::array<std::int16_t, 1024> marlin_permutation(int bits);
// The same for a row of scales: 64 columns (groups along K), 32 (one scale per channel).
std::array<std::int16_t, 64> marlin_group_scale_permutation();
std::array<std::int16_t, 32> marlin_channel_scale_permutation();

// codes U8 [N, K] <-> packed I32 [K/16, N*16*bits/32], value i of a word in bits bits*i.
// kInvalidShape unless K % 16 == 0 and N % 64 == 0; kInvalidArgument for bits other than 4 or 8 or
// a code that does not fit (naming row and column). Also dtypes, layout, aliasing. Each undoes the
// other.
Status pack_marlin_weight(ConstTensorView codes, int bits, TensorView packed);
Status unpack_marlin_weight(ConstTensorView packed, int bits, TensorView codes);

// Rows of scales (or of a bias, as [1, N]): [G, N], elements of 2 or 4 bytes, to Marlin's order and
// back. grouped: there is more than one group along K (64 columns at a time), else 32.
// kInvalidShape unless N is a multiple of that.
Status to_marlin_scales(ConstTensorView scales, bool grouped, TensorView out);
Status from_marlin_scales(ConstTensorView scales, bool grouped, TensorView out);

// zeros U8 [N, G] <-> packed I32 [G, N*bits/32]: the grouped scale order, then the interleave of a
// word's values. N % 64 == 0.
Status pack_marlin_zeros(ConstTensorView zeros, int bits, TensorView packed);
Status unpack_marlin_zeros(ConstTensorView packed, int bits, TensorView zeros);

// --- int4 weights in the order of an FP8 MMA's register operand
// Read by: W4A8 kernels (int4 weights, FP8 activations) on Hopper that take weights as the A
// operand: each thread's sixteen codes of a 64 x 32 tile lie together in two words, so that one
// 64-bit load feeds one instruction. Source: register fragment of wgmma m64nNk32, PTX ISA.

inline constexpr std::int64_t kInt4MmaRows = 64;
inline constexpr std::int64_t kInt4MmaCols = 32;
inline constexpr std::int64_t kInt4MmaThreads = 128;

// Which element of a 64 x 32 tile is value i (0 .. 15) of thread t (0 .. 127): rows r and r + 8
// with r = 16 (t / 32) + t % 32 / 4, columns 4 (t % 4) .. + 3, then the same 16 columns further.
struct Int4MmaElement {
  std::int64_t row, col;
};
constexpr Int4MmaElement int4_mma_element(std::int64_t t, std::int64_t i) {
  return {t / 32 * 16 + t % 32 / 4 + i / 4 % 2 * 8, t % 4 * 4 + i % 4 + i / 8 * 16};
}

// nibbles [N, K/2] U8, even column low, any 4-bit code <-> words I32 [N/64, K/32, 128, 2]: value i
// of a thread in bits 4 (i % 8) of word i / 8. kInvalidShape unless N % 64 == 0 and K % 32 == 0;
// also dtypes, layout, aliasing. Each undoes the other. Codes are not changed: the W4A8
// encoding of codes works on words before or after.
Status pack_int4_mma(ConstTensorView nibbles, TensorView words);
Status unpack_int4_mma(ConstTensorView words, TensorView nibbles);

// --- Block scales in 128 x 4 tiles
// Read by: tensor cores with block-scaled formats (CUTLASS, cuBLAS and FlashInfer kernels for NVFP4
// and MX on Blackwell). A matrix [M, KS] of scale bytes (KS = K/16 for NVFP4, K/32 for MX) is padded
// to [align(M, 128), align(KS, 4)] and stored tile by tile, each tile as [32][4][4] =
// [row % 32][row / 32][column].

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

// --- Scales of FP8 groups, column-major
// Read by: DeepGEMM's FP8 GEMMs, which load scales by TMA: columns are padded, and on Blackwell four
// power-of-two scales lie in a 32-bit word (packed UE8M0). A matrix of scales is [M, G] (rows or row
// blocks by groups along K), or [E, M, G]. "Aligned" rows are align(M, 4): a column of 4-byte
// elements then begins on 16 bytes, as TMA requires.

// align(rows, 16 / element_bytes) for elements of 1, 2, 4, 8 or 16 bytes.
constexpr std::int64_t tma_aligned_rows(std::int64_t rows, std::int64_t element_bytes) {
  const std::int64_t step = 16 / element_bytes;
  return (rows + step - 1) / step * step;
}

// fp32, column-major:

// Shape of the storage: [G, align(M, 4)] F32, with the leading E where there is one. Column g of
// the scales is row g of the storage; strides of the scales inside are (1, align(M, 4)).
Result<Shape> column_major_shape(const Shape& scales);
// scales [.., M, G] F32 <-> storage F32. Padded rows are written as 0 and ignored when read.
Status to_column_major(ConstTensorView scales, TensorView storage);
Status from_column_major(ConstTensorView storage, TensorView scales);

// UE8M0, four per word, column-major:

// Shape of the storage: [ceil(G/4), align(M, 4)] I32, with the leading E. The byte of (m, g) is
// byte g % 4 (0 = lowest) of word (g / 4, m).
Result<Shape> packed_ue8m0_shape(const Shape& scales);
// scales: F32 powers of two, F8_E8M0 or U8 exponent bytes, [.., M, G]. An F32 that is not a power
// of two from 2^-126 to 2^127 (sign and mantissa 0) or a byte 0xFF is kInvalidArgument, naming its
// place: requantise instead of cutting a mantissa. Missing groups and padded rows are 0 bytes.
Status pack_ue8m0(ConstTensorView scales, TensorView storage);
// To F32 or to exponent bytes (F8_E8M0 or U8).
Status unpack_ue8m0(ConstTensorView storage, TensorView scales);

// weights:

// Row-block scales [.., ceil(N/block_n), G] to one row each: out[n, g] = scales[n / block_n, g],
// elements copied as they are (any dtype of 1 or 4 bytes, both sides the same). out [.., N, G]. The
// step before pack_ue8m0 for weights. Its inverse is collapse_row_blocks, which refuses
// (kInvalidArgument) rows of a block that differ.
Status expand_row_blocks(ConstTensorView scales, std::int64_t block_n, TensorView out);
Status collapse_row_blocks(ConstTensorView rows, std::int64_t block_n, TensorView out);

}  // namespace moesaic
