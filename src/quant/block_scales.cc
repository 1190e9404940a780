#include "quant/block_scales.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "numerics/element.h"

namespace moesaic::quant {
namespace {

std::string block_text(const Shape& weight, BlockShape block) {
  return " for block " + std::to_string(block.n) + "x" + std::to_string(block.k) + " of " +
         weight.to_string();
}

// "[2, 0, 5]" for a rank-3 scale, "[0, 5]" for a rank-2 one.
std::string index_text(const Shape& shape, std::int64_t e, std::int64_t i, std::int64_t j) {
  return (shape.rank() == 3 ? Shape({e, i, j}) : Shape({i, j})).to_string();
}

// Whether every e4m3 code of tile (i, j) of the [N, K] matrix is a zero, of either sign.
bool tile_is_zero(const std::uint8_t* weight, std::int64_t rows, std::int64_t cols,
                  BlockShape block, std::int64_t i, std::int64_t j) {
  for (std::int64_t r = i * block.n; r < std::min((i + 1) * block.n, rows); ++r) {
    for (std::int64_t c = j * block.k; c < std::min((j + 1) * block.k, cols); ++c) {
      if ((weight[r * cols + c] & 0x7F) != 0) return false;
    }
  }
  return true;
}

}  // namespace

Result<Shape> block_scale_shape(const Shape& weight, BlockShape block) {
  // 2^31: no format has larger tiles, and ceil_div cannot overflow below it.
  constexpr std::int64_t kMaxBlock = std::int64_t{1} << 31;
  if (block.n < 1 || block.k < 1 || block.n > kMaxBlock || block.k > kMaxBlock) {
    return Status(StatusCode::kInvalidArgument, "block: got " + std::to_string(block.n) + "x" +
                                                    std::to_string(block.k) +
                                                    ", need sizes 1 .. 2^31");
  }
  if (weight.rank() != 2 && weight.rank() != 3) {
    return Status(StatusCode::kInvalidShape,
                  "weight: got " + weight.to_string() + ", need rank 2 [N, K] or 3 [E, N, K]");
  }
  MOESAIC_RETURN_IF_ERROR(weight.num_elements().status());
  const int r = weight.rank();
  // cdiv without the sum: a dimension may be near 2^63 when another one is 0.
  const auto tiles = [](std::int64_t size, std::int64_t b) {
    return size / b + (size % b != 0 ? 1 : 0);
  };
  const std::int64_t rows = tiles(weight[r - 2], block.n);
  const std::int64_t cols = tiles(weight[r - 1], block.k);
  return r == 2 ? Shape({rows, cols}) : Shape({weight[0], rows, cols});
}

Status expect_block_scale_shape(std::string_view field, const ConstTensorView& scale,
                                const Shape& weight, BlockShape block) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape want, block_scale_shape(weight, block));
  Status status = expect_shape(field, scale, want);
  if (status.ok()) return status;
  return Status(status.code(), status.message() + block_text(weight, block));
}

Status validate_block_scales(std::string_view field, const ConstTensorView& scale,
                             const ConstTensorView& weight, BlockShape block) {
  if (scale.dtype != DType::kF32 && scale.dtype != DType::kBF16 && scale.dtype != DType::kF8E8M0) {
    return Status(StatusCode::kInvalidDType, std::string(field) + ": got " +
                                                 std::string(dtype_name(scale.dtype)) +
                                                 ", need F32, BF16 or F8_E8M0");
  }
  MOESAIC_RETURN_IF_ERROR(expect_dtype("weight", weight, DType::kF8E4M3));
  MOESAIC_RETURN_IF_ERROR(expect_block_scale_shape(field, scale, weight.shape, block));
  MOESAIC_RETURN_IF_ERROR(expect_shape("weight", weight, weight.shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, scale));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("weight", weight));
  if (MOESAIC_FAULT(quant_accept_any_scale)) return {};

  const int r = weight.rank();
  const std::int64_t experts = r == 3 ? weight.dim(0) : 1;
  const std::int64_t rows = weight.dim(r - 2);
  const std::int64_t cols = weight.dim(r - 1);
  const std::int64_t tile_rows = scale.dim(r - 2);
  const std::int64_t tile_cols = scale.dim(r - 1);
  std::int64_t index = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t i = 0; i < tile_rows; ++i) {
      for (std::int64_t j = 0; j < tile_cols; ++j, ++index) {
        const float s = load_as_f32(scale.data, scale.dtype, index);
        if (s > 0.0F && std::isfinite(s)) continue;
        std::string need = "a positive finite number";
        if (s == 0.0F) {
          const auto* matrix = weight.as<std::uint8_t>() + e * rows * cols;
          if (tile_is_zero(matrix, rows, cols, block, i, j)) continue;
          need += " (the weights under this scale are not all zero)";
        }
        const std::string value = std::isnan(s) ? "NaN" : std::to_string(s);
        std::string text(field);
        text.append(index_text(scale.shape, e, i, j)).append(": got ").append(value);
        return Status(StatusCode::kInvalidArgument, text.append(", need ").append(need));
      }
    }
  }
  return {};
}

}  // namespace moesaic::quant
