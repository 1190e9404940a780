// The layout in which the CPU kernels read weights, and the (invertible) way into it and back.
//
// One expert's matrix [rows, K] becomes panels of 64 output columns (= rows of the matrix). A panel
// is a sequence of k-units of 256 bytes, k ascending, so a core streams it front to back. In a
// unit, column c of the panel owns the 4 bytes at 4*c: 1 fp32, 2 sixteen-bit steps of k in order,
// or 4 eight-bit steps; eight-bit steps of four neighbouring columns share 16 bytes ordered (k0,k1)
// of each column, then (k2,k3) of each, which is what the decoders want (kI8Quads: in order, which is
// what the dot product wants; kI4Quads: so too, with the eight steps of nibbles). Sixteen six-bit
// steps are three such units, "planes", of which a column owns the same 4 bytes in each
// (packed_weights.cc). A gated w13 interleaves:
// panel p holds gate rows 32p..32p+31, then up rows 32p..32p+31, so that the activation finds both
// halves in one result tile. Rows and K beyond the matrix are zero.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/checked.h"
#include "cpu/kernels.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::cpu {

enum class RowOrder : std::uint8_t { kPlain, kGateUp };

// Shape of the packed form; a value.
struct PackedShape {
  WeightKind kind = WeightKind::kBF16;
  RowOrder order = RowOrder::kPlain;
  std::int64_t rows = 0;
  std::int64_t k = 0;
  std::int64_t k_multiple = 4;  // of padded_k; kCode4: a multiple of 8; kI6: of 16
  // Flipped in every code on the way in: turns unsigned codes into two's complement around the
  // middle of their range (0x8 or 0x80). Padding is 0 all the same.
  std::uint8_t code_flip = 0;

  std::int64_t elem_bits() const;
  std::int64_t padded_k() const { return round_up(k, k_multiple); }
  std::int64_t num_panels() const;
  std::int64_t bytes_of(
      std::int64_t steps) const;  // whole units of a panel: steps * 64 * elem_bits / 8
  std::int64_t panel_bytes() const { return bytes_of(padded_k()); }
  std::int64_t num_groups() const;    // ceil(padded_k / 128)
  std::int64_t matrix_bytes() const;  // kLimitExceeded sizes are refused by check_packed_shape
  // Row of the matrix that column `column` of panel `panel` holds, or -1 for padding.
  std::int64_t source_row(std::int64_t panel, int column) const;
};
// Sizes within 2^46 bytes, rows even for kGateUp.
Status check_packed_shape(const PackedShape& shape, std::int64_t num_matrices);

// src: [rows, K] contiguous in the kind's dtype (kI6, kI6Quads: I8 in -32 .. 31); dst: matrix_bytes(), 64-byte aligned. Parallel
// over panels.
void pack_matrix(const PackedShape& shape, const std::byte* src, std::byte* dst, int num_threads);

// Index of the first element that the kind has no room for, or -1; only kI6 and kI6Quads have any.
std::int64_t find_wide_code(const PackedShape& shape, const std::byte* src);

// Block scales [ceil(rows/128), ceil(K/128)] F32 (rows counted within each half for kGateUp) -> [panel][group][4], one scale per 16 columns; padding
// columns get 0.
void pack_block_scales(const PackedShape& shape, const float* scales, std::int64_t scale_cols,
                       float* dst);

// Scales of `rows` rows (1, or more: counted within each half for kGateUp) and groups of `columns`
// columns, [ceil(rows of the matrix / rows), ceil(K / columns)] contiguous (or [rows of the matrix]
// when columns >= K), of F32, BF16 or F16, F8_E8M0 or F8_E4M3 -> [panel][padded_k / fold][64] of the
// form; columns is a multiple of fold or at least K. Padding gets 1, which meets weights of 0.
// Returns the index of a scale that is not exactly a number of the form, or -1.
struct ScaleTile {
  std::int64_t rows, columns;
};
std::int64_t pack_group_scales(const PackedShape& shape, std::int64_t fold, ScaleTile tile,
                               GroupScaleForm form, const ConstTensorView& scale, std::byte* dst);

// What a group's dequantisation takes away from scale * code, as F32 [panel][padded_k / fold][64]:
//   zero   scale * (zero - bias)      min   min - scale * bias      neither   -scale * bias
// where bias is what code_flip took out of the codes (8, 128 or 0). zero is U8 or I8, min F32, both
// of the scale's shape. Padding gets 0.
void pack_group_offsets(const PackedShape& shape, std::int64_t fold, std::int64_t columns,
                        const ConstTensorView& scale, const ConstTensorView& zero,
                        const ConstTensorView& min, int bias, float* dst);

struct WeightFree {
  std::int64_t bytes = 0;
  void operator()(std::byte* p) const;
};

// Large, page-friendly, uninitialised memory for weights. kOutOfMemory names the size.
class WeightBuffer {
 public:
  static Result<WeightBuffer> allocate(std::int64_t bytes);
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[], WeightFree> data_;
  std::int64_t bytes_ = 0;
};

}  // namespace moesaic::cpu
