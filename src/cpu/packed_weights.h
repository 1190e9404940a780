// The layout in which the CPU kernels read weights, and the (invertible) way into it and back.
//
// One expert's matrix [rows, K] becomes panels of 64 output columns (= rows of the matrix). A panel
// is a sequence of k-units of 256 bytes, k ascending, so a core streams it front to back. In a
// unit, column c of the panel owns the 4 bytes at 4*c: 1 fp32, 2 sixteen-bit steps of k in order,
// or 4 eight-bit steps; eight-bit steps of four neighbouring columns share 16 bytes ordered (k0,k1)
// of each column, then (k2,k3) of each, which is what the decoders want. A gated w13 interleaves:
// panel p holds gate rows 32p..32p+31, then up rows 32p..32p+31, so that the activation finds both
// halves in one result tile. Rows and K beyond the matrix are zero.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

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

  std::int64_t elem_bits() const;
  std::int64_t padded_k() const;  // next multiple of 4; e2m1: of 32
  std::int64_t num_panels() const;
  std::int64_t panel_bytes() const;   // padded_k * 64 * elem_bits / 8
  std::int64_t num_groups() const;    // ceil(padded_k / 128)
  std::int64_t matrix_bytes() const;  // kLimitExceeded sizes are refused by check_packed_shape
  // Row of the matrix that column `column` of panel `panel` holds, or -1 for padding.
  std::int64_t source_row(std::int64_t panel, int column) const;
};
Result<WeightKind> weight_kind(DType dtype);
// Sizes within 2^46 bytes, rows even for kGateUp.
Status check_packed_shape(const PackedShape& shape, std::int64_t num_matrices);

// src: [rows, K] contiguous in the kind's dtype; dst: matrix_bytes(), 64-byte aligned. Parallel
// over panels.
void pack_matrix(const PackedShape& shape, const std::byte* src, std::byte* dst, int num_threads);
// The inverse: dst [rows, K].
void unpack_matrix(const PackedShape& shape, const std::byte* src, std::byte* dst);

// Block scales [ceil(rows/128), ceil(K/128)] F32 (row blocks counted within each half for kGateUp,
// whose halves must be multiples of 128) -> [panel][group][4], one scale per 16 columns; padding
// columns get 0.
void pack_block_scales(const PackedShape& shape, const float* scales, std::int64_t scale_cols,
                       float* dst);

// MXFP4 scales [rows, K / 32] E8M0 -> [panel][K / 32][64], one per column; padding columns get 1.
void pack_exponents(const PackedShape& shape, const std::uint8_t* scales, std::uint8_t* dst);

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
