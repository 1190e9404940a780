#include "quant/fp8_scaled.h"

#include <algorithm>
#include <string>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"
#include "quant/fp8_weight_scale.h"

namespace moesaic::quant {
namespace {

// Shape without its last dimension.
Result<Shape> leading(const Shape& shape) {
  if (shape.rank() < 1) {
    return Status(StatusCode::kInvalidShape, "x: got " + shape.to_string() + ", need rank >= 1");
  }
  return Shape::from(shape.dims().first(static_cast<std::size_t>(shape.rank() - 1)));
}

}  // namespace

float fp8_row_scale(float amax) {
  const float floor = MOESAIC_FAULT(quant_no_token_floor) ? 0.0F : kFp8RowMinScale;
  return std::max(amax / kE4m3Max, floor);
}

Status quantize_fp8_tensor(ConstTensorView x, TensorView q, TensorView scale) {
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"x", x, kPlainFloats, x.shape},
      {"q", q, accept(DType::kF8E4M3), x.shape, true},
      {"scale", scale, accept(DType::kF32), {1}, true},
  }));
  MOESAIC_RETURN_IF_ERROR(expect_finite("x", x));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, x.shape.num_elements());
  const float s = max_abs(x, 0, count) / kE4m3Max;
  *scale.as<float>() = s;
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = load_as_f32(x.data, x.dtype, i);
    q.as<std::uint8_t>()[i] = s == 0.0F ? std::uint8_t{0} : e4m3_from_f32(value / s);
  }
  return {};
}

Status quantize_fp8_rows(ConstTensorView x, TensorView q, TensorView scale) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape rows_shape, leading(x.shape));
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"x", x, kPlainFloats, x.shape},
      {"q", q, accept(DType::kF8E4M3), x.shape, true},
      {"scale", scale, accept(DType::kF32), rows_shape, true},
  }));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t rows, rows_shape.num_elements());
  const std::int64_t k = x.dim(x.rank() - 1);
  for (std::int64_t m = 0; m < rows; ++m) {
    const float s = fp8_weight_scale(max_abs(x, m * k, k), kFp8RowMinScale);
    scale.as<float>()[m] = s;
    for (std::int64_t i = m * k; i < (m + 1) * k; ++i) {
      q.as<std::uint8_t>()[i] = e4m3_from_f32(load_as_f32(x.data, x.dtype, i) / s);
    }
  }
  return {};
}

Status dequantize_scaled(ConstTensorView q, ConstTensorView scale, TensorView out) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape rows_shape, leading(q.shape));
  const bool per_tensor = scale.shape == Shape{1};
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"q", q, accept(DType::kF8E4M3, DType::kI8), q.shape},
      {"scale", scale, accept(DType::kF32), per_tensor ? Shape{1} : rows_shape},
      {"out", out, kPlainFloats, q.shape, true},
  }));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, q.shape.num_elements());
  const std::int64_t k = q.dim(q.rank() - 1);
  const bool one = per_tensor || MOESAIC_FAULT(quant_row_scale_of_first);
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = q.dtype == DType::kI8 ? static_cast<float>(q.as<std::int8_t>()[i])
                                              : f32_from_e4m3(q.as<std::uint8_t>()[i]);
    store_from_f32(out.data, out.dtype, i, value * scale.as<float>()[one ? 0 : i / k]);
  }
  return {};
}

}  // namespace moesaic::quant
