// Block scales in 128 x 4 tiles.

#include <cstring>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "moesaic/interop/layouts.h"
#include "quant/arguments.h"

namespace moesaic {
namespace {

// Calls visit(row-major index, swizzled index) for every scale; both count from the first expert.
template <class Visit>
void for_scales(const Shape& scales, const Shape& swizzled, Visit&& visit) {
  const int r = scales.rank();
  const std::int64_t experts = r == 3 ? scales[0] : 1;
  const std::int64_t rows = scales[r - 2];
  const std::int64_t cols = scales[r - 1];
  const std::int64_t stride = swizzled[r - 2] * swizzled[r - 1];
  if (rows == 0 || cols == 0) return;  // however many experts have none
  const std::int64_t k_tiles = swizzled[r - 1] / kSwizzleCols;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t m = 0; m < rows; ++m) {
      for (std::int64_t k = 0; k < cols; ++k) {
        visit((e * rows + m) * cols + k, e * stride + swizzle_offset(m, k, k_tiles));
      }
    }
  }
}

Status check_swizzle(const ConstTensorView& scales, const ConstTensorView& swizzled,
                     bool to_swizzled) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape shape, swizzled_shape(scales.shape));
  constexpr quant::DTypeMask kBytes = quant::accept(DType::kF8E4M3, DType::kF8E8M0, DType::kU8);
  return quant::check_arguments({
      {"scales", scales, kBytes, scales.shape, !to_swizzled},
      {"swizzled", swizzled, kBytes & quant::accept(scales.dtype), shape, to_swizzled},
  });
}

}  // namespace

Result<Shape> swizzled_shape(const Shape& scales) {
  const int r = scales.rank();
  if (r != 2 && r != 3) {
    return Status(StatusCode::kInvalidShape,
                  "scales: got " + scales.to_string() + ", need rank 2 [M, KS] or 3 [E, M, KS]");
  }
  constexpr std::int64_t kLargest = std::int64_t{1} << 62;
  if (scales[r - 2] > kLargest || scales[r - 1] > kLargest) {
    return Status(StatusCode::kLimitExceeded,
                  "scales: got " + scales.to_string() + ", need dimensions up to 2^62");
  }
  const std::int64_t rows = round_up(scales[r - 2], kSwizzleRows);
  const std::int64_t cols = round_up(scales[r - 1], kSwizzleCols);
  const Shape shape = r == 3 ? Shape({scales[0], rows, cols}) : Shape({rows, cols});
  MOESAIC_RETURN_IF_ERROR(shape.num_elements().status());
  return shape;
}

Status swizzle_block_scales(ConstTensorView scales, TensorView swizzled) {
  MOESAIC_RETURN_IF_ERROR(check_swizzle(scales, swizzled, true));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, swizzled.shape.num_elements());
  if (bytes > 0) std::memset(swizzled.data, 0, static_cast<std::size_t>(bytes));
  for_scales(scales.shape, swizzled.shape, [&](std::int64_t from, std::int64_t to) {
    swizzled.data[MOESAIC_FAULT(quant_swizzle_identity) ? from : to] = scales.data[from];
  });
  return {};
}

Status unswizzle_block_scales(ConstTensorView swizzled, TensorView scales) {
  MOESAIC_RETURN_IF_ERROR(check_swizzle(scales, swizzled, false));
  for_scales(scales.shape, swizzled.shape,
             [&](std::int64_t to, std::int64_t from) { scales.data[to] = swizzled.data[from]; });
  return {};
}

Status block_scale_offsets(ConstTensorView rows, TensorView first) {
  if (rows.rank() != 1) {
    return Status(StatusCode::kInvalidShape,
                  "rows: got " + rows.shape.to_string() + ", need rank 1 [E]");
  }
  const std::int64_t experts = rows.dim(0);
  MOESAIC_RETURN_IF_ERROR(quant::check_arguments({
      {"rows", rows, quant::accept(DType::kI32), {experts}},
      {"first", first, quant::accept(DType::kI32), {experts + 1}, true},
  }));
  std::int64_t sum = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    first.as<std::int32_t>()[e] = static_cast<std::int32_t>(sum);
    const std::int64_t count = rows.as<std::int32_t>()[e];
    if (count < 0) {
      return Status(
          StatusCode::kInvalidArgument,
          "rows[" + std::to_string(e) + "]: got " + std::to_string(count) + ", need a number >= 0");
    }
    sum += round_up(count, kSwizzleRows);
    if (sum > INT32_MAX) {
      return Status(StatusCode::kLimitExceeded,
                    "rows: got " + std::to_string(sum) + " scale rows, need fewer than 2^31");
    }
  }
  first.as<std::int32_t>()[experts] = static_cast<std::int32_t>(sum);
  return {};
}

}  // namespace moesaic
