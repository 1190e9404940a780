#include "quant/fp8_group.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "numerics/codec.h"

namespace moesaic::quant {
namespace {

// Reads elements through `load` so that a strided dtype needs no row buffer.
template <class Load>
void quantize_row(const Load& load, std::int64_t k, std::int64_t group, ScaleRounding rounding,
                  std::uint8_t* q, float* scales, std::int64_t scale_stride) {
  for (std::int64_t g = 0; g < k / group; ++g) {
    float amax = 0.0F;
    // std::max keeps its first argument when the second is NaN.
    for (std::int64_t i = g * group; i < (g + 1) * group; ++i) {
      amax = std::max(amax, std::abs(load(i)));
    }
    const float s = fp8_group_scale(amax, rounding);
    scales[g * scale_stride] = s;
    // e4m3_from_f32 saturates, which is the clamp to +-448.
    for (std::int64_t i = g * group; i < (g + 1) * group; ++i) q[i] = e4m3_from_f32(load(i) / s);
  }
}

// Scales are row-major or column-major, either with padding between lines. On success *extent views
// the memory they span, as one line.
Status check_scale_layout(const ConstTensorView& scale, ConstTensorView* extent) {
  const std::int64_t rows = scale.dim(0);
  const std::int64_t groups = scale.dim(1);
  const std::int64_t s0 = scale.strides[0];
  const std::int64_t s1 = scale.strides[1];
  const bool row_major = (s1 == 1 || groups <= 1) && (s0 >= groups || rows <= 1);
  const bool column_major = (s0 == 1 || rows <= 1) && (s1 >= rows || groups <= 1);
  std::int64_t count = 0;
  if (rows > 0 && groups > 0) {
    const auto last_row = checked_mul(rows - 1, s0);
    const auto last_group = checked_mul(groups - 1, s1);
    const auto last = last_row && last_group ? checked_add(*last_row, *last_group) : std::nullopt;
    // A line of that many F32 must also have a size in bytes.
    if ((!row_major && !column_major) || !last || *last >= (std::int64_t{1} << 60)) {
      return Status(StatusCode::kInvalidLayout,
                    "scale: got strides " + Shape({s0, s1}).to_string() + " for " +
                        scale.shape.to_string() + ", need row-major or column-major");
    }
    count = *last + 1;
  }
  *extent = ConstTensorView(scale.data, DType::kF32, {count});
  return {};
}

// Shared checks of both directions; the element tensor that is not F8_E4M3 is called `name`.
Status check_operands(std::string_view name, const ConstTensorView& x, const ConstTensorView& q,
                      const ConstTensorView& scale, std::int64_t group) {
  if (group < 1) {
    return Status(StatusCode::kInvalidArgument,
                  "group: got " + std::to_string(group) + ", need a number >= 1");
  }
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype(name, x.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("q", q, DType::kF8E4M3));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("scale", scale, DType::kF32));
  if (x.rank() != 2) {
    return Status(StatusCode::kInvalidShape,
                  std::string(name) + ": got " + x.shape.to_string() + ", need rank 2 [M, K]");
  }
  if (x.dim(1) % group != 0) {
    return Status(StatusCode::kInvalidShape,
                  std::string(name) + ": got K = " + std::to_string(x.dim(1)) +
                      ", need a multiple of the group size " + std::to_string(group));
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape(name, x, x.shape));
  MOESAIC_RETURN_IF_ERROR(expect_shape("q", q, x.shape));
  MOESAIC_RETURN_IF_ERROR(expect_shape("scale", scale, {x.dim(0), x.dim(1) / group}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(name, x));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("q", q));
  ConstTensorView extent;
  MOESAIC_RETURN_IF_ERROR(check_scale_layout(scale, &extent));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap(name, x, "scale", extent));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("q", q, "scale", extent));
  return expect_no_overlap(name, x, "q", q);
}

}  // namespace

float fp8_group_scale(float amax, ScaleRounding rounding) {
  const float floor = MOESAIC_FAULT(quant_no_amax_floor) ? 0.0F : kFp8GroupEps;
  const float scale = std::max(amax, floor) / kE4m3Max;
  if (rounding == ScaleRounding::kNone) return scale;
  return f32_from_e8m0(e8m0_from_scale_ceil(std::max(scale, kFp8GroupEps)));
}

void ref_quantize_fp8_row(const float* x, std::int64_t k, std::int64_t group,
                          ScaleRounding rounding, std::uint8_t* q, float* scales,
                          std::int64_t scale_stride) {
  quantize_row([x](std::int64_t i) { return x[i]; }, k, group, rounding, q, scales, scale_stride);
}

Status quantize_fp8_group(ConstTensorView x, std::int64_t group, ScaleRounding rounding,
                          TensorView q, TensorView scale) {
  MOESAIC_RETURN_IF_ERROR(check_operands("x", x, q, scale, group));
  const std::int64_t k = x.dim(1);
  for (std::int64_t m = 0; m < x.dim(0); ++m) {
    quantize_row([&](std::int64_t i) { return load_as_f32(x.data, x.dtype, m * k + i); }, k, group,
                 rounding, q.as<std::uint8_t>() + m * k, scale.as<float>() + m * scale.strides[0],
                 scale.strides[1]);
  }
  return {};
}

Status dequantize_fp8_group(ConstTensorView q, ConstTensorView scale, std::int64_t group,
                            TensorView out) {
  MOESAIC_RETURN_IF_ERROR(check_operands("out", out, q, scale, group));
  const std::int64_t k = q.dim(1);
  for (std::int64_t m = 0; m < q.dim(0); ++m) {
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t row = MOESAIC_FAULT(quant_scale_of_first_row) ? 0 : m;
      const float s = scale.as<float>()[row * scale.strides[0] + (i / group) * scale.strides[1]];
      store_from_f32(out.data, out.dtype, m * k + i,
                     f32_from_e4m3(q.as<std::uint8_t>()[m * k + i]) * s);
    }
  }
  return {};
}

}  // namespace moesaic::quant
