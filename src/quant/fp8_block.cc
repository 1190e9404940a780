#include "quant/fp8_block.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/fault.h"
#include "core/refusal.h"
#include "numerics/codec.h"
#include "quant/fp8_weight_scale.h"

namespace moesaic::quant {
namespace {

// The stack of matrices of a weight of rank 2 or 3 and the tiles of each.
struct Tiling {
  std::int64_t matrices, rows, cols, tile_rows, tile_cols;
  BlockShape block;
};
Tiling tiling_of(const Shape& weight, const Shape& scale, BlockShape block) {
  const int r = weight.rank();
  return {r == 3 ? weight[0] : 1, weight[r - 2], weight[r - 1], scale[r - 2], scale[r - 1], block};
}

// Calls visit(flat element index) for the elements of tile (i, j) of matrix m, row by row.
template <class Visit>
void for_tile(const Tiling& t, std::int64_t m, std::int64_t i, std::int64_t j, Visit&& visit) {
  const std::int64_t row_end = std::min((i + 1) * t.block.n, t.rows);
  const std::int64_t col_end = std::min((j + 1) * t.block.k, t.cols);
  for (std::int64_t r = i * t.block.n; r < row_end; ++r) {
    for (std::int64_t c = j * t.block.k; c < col_end; ++c) visit((m * t.rows + r) * t.cols + c);
  }
}

Status expect_finite(const ConstTensorView& w) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, w.shape.num_elements());
  const std::int64_t cols = w.rank() > 0 ? w.dim(w.rank() - 1) : 1;
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = load_as_f32(w.data, w.dtype, i);
    if (std::isfinite(x)) continue;
    return Status(StatusCode::kInvalidArgument,
                  "w: row " + std::to_string(i / cols) + ", column " + std::to_string(i % cols) +
                      ": got " + (std::isnan(x) ? "NaN" : "infinity") + ", need a finite number");
  }
  return {};
}

float tile_scale(float amax, ScaleRounding rounding) {
  const float scale = fp8_weight_scale(amax, kFp8BlockMinAmax / kE4m3Max);
  if (rounding == ScaleRounding::kNone) return scale;
  return f32_from_e8m0(e8m0_from_scale_ceil(scale));
}

}  // namespace

Status quantize_fp8_block(ConstTensorView w, BlockShape block, ScaleRounding rounding, TensorView q,
                          TensorView scale) {
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("w", w.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("q", q, DType::kF8E4M3));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("scale", scale, DType::kF32));
  MOESAIC_RETURN_IF_ERROR(expect_block_scale_shape("scale", scale, w.shape, block));
  MOESAIC_RETURN_IF_ERROR(expect_shape("w", w, w.shape));
  MOESAIC_RETURN_IF_ERROR(expect_shape("q", q, w.shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("w", w));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("q", q));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("scale", scale));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("w", w, "q", q));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("w", w, "scale", scale));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("q", q, "scale", scale));
  MOESAIC_RETURN_IF_ERROR(expect_finite(w));

  const Tiling t = tiling_of(w.shape, scale.shape, block);
  std::int64_t tile = 0;
  for (std::int64_t m = 0; m < t.matrices; ++m) {
    for (std::int64_t i = 0; i < t.tile_rows; ++i) {
      for (std::int64_t j = 0; j < t.tile_cols; ++j, ++tile) {
        float amax = 0.0F;
        for_tile(t, m, i, j, [&](std::int64_t at) {
          amax = std::max(amax, std::abs(load_as_f32(w.data, w.dtype, at)));
        });
        const float s = tile_scale(amax, rounding);
        scale.as<float>()[tile] = s;
        const float inverse = 1.0F / s;
        for_tile(t, m, i, j, [&](std::int64_t at) {
          q.as<std::uint8_t>()[at] = e4m3_from_f32(load_as_f32(w.data, w.dtype, at) * inverse);
        });
      }
    }
  }
  return {};
}

Status dequantize_fp8_block(ConstTensorView q, ConstTensorView scale, BlockShape block,
                            TensorView out) {
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("out", out.dtype));
  MOESAIC_RETURN_IF_ERROR(validate_block_scales("scale", scale, q, block));
  MOESAIC_RETURN_IF_ERROR(expect_shape("out", out, q.shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("out", out));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("q", q, "out", out));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("scale", scale, "out", out));

  const Tiling t = tiling_of(q.shape, scale.shape, block);
  std::int64_t tile = 0;
  for (std::int64_t m = 0; m < t.matrices; ++m) {
    for (std::int64_t i = 0; i < t.tile_rows; ++i) {
      for (std::int64_t j = 0; j < t.tile_cols; ++j, ++tile) {
        // The first scale of the row stands for a kernel that forgets to advance along K.
        const std::int64_t which = MOESAIC_FAULT(quant_stale_scale_column) ? tile - j : tile;
        const float s = load_as_f32(scale.data, scale.dtype, which);
        for_tile(t, m, i, j, [&](std::int64_t at) {
          store_from_f32(out.data, out.dtype, at, f32_from_e4m3(q.as<std::uint8_t>()[at]) * s);
        });
      }
    }
  }
  return {};
}

}  // namespace moesaic::quant
