#include "quant/int_group.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"

namespace moesaic::quant {
namespace {

// Integers up to 2^22 in magnitude, ties to even, under the default rounding mode.
float round_to_even(float x) {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23
  return (x + kMagic) - kMagic;
}

// Columns of a group and the shape of the scales.
struct Grid {
  std::int64_t group, per_row;
};
Result<Grid> grid_of(std::string_view field, const ConstTensorView& x, std::int64_t group) {
  MOESAIC_RETURN_IF_ERROR(expect_matrix(field, x));
  const std::int64_t k = x.dim(1);
  if (group == -1) return Grid{std::max<std::int64_t>(k, 1), 1};
  if (group < 1) {
    return Status(StatusCode::kInvalidArgument, "group: got " + std::to_string(group) +
                                                    ", need a number >= 1, or -1 for whole rows");
  }
  return Grid{group, k / group + (k % group != 0 ? 1 : 0)};
}

Status expect_bits(int bits) {
  if (bits >= 2 && bits <= 8) return {};
  return Status(StatusCode::kInvalidArgument,
                "bits: got " + std::to_string(bits) + ", need 2 .. 8");
}

// Stores a scale in its dtype and reads back what a consumer will see. 1 for groups of zeros, and
// for groups so small that their scale rounds to 0 (their codes are then 0 as well).
Result<float> store_scale(const TensorView& scale, std::int64_t at, float value) {
  store_from_f32(scale.data, scale.dtype, at, value);
  float stored = load_as_f32(scale.data, scale.dtype, at);
  if (!std::isfinite(stored)) {
    return Status(StatusCode::kInvalidArgument,
                  "x: a group needs the scale " + std::to_string(value) +
                      ", need one that is finite in " + std::string(dtype_name(scale.dtype)));
  }
  if (stored == 0.0F) {
    stored = 1.0F;
    store_from_f32(scale.data, scale.dtype, at, stored);
  }
  return stored;
}

// Smallest and largest element, both widened to contain 0.
struct Range {
  float low = 0.0F;
  float high = 0.0F;
};
Range range_of(const ConstTensorView& x, std::int64_t begin, std::int64_t end) {
  Range r;
  for (std::int64_t i = begin; i < end; ++i) {
    const float value = load_as_f32(x.data, x.dtype, i);
    r.low = std::min(r.low, value);
    r.high = std::max(r.high, value);
  }
  return r;
}

float symmetric_scale(const Range& range, IntScaleRule rule, int largest_code) {
  const auto high = static_cast<float>(largest_code);
  const float amax = std::max(range.high, -range.low);
  switch (rule) {
    case IntScaleRule::kLargestCode:
      break;
    case IntScaleRule::kBothEnds:
      return std::max(range.high / high, -range.low / (high + 1.0F));
    case IntScaleRule::kFullRange:
      return amax / (high + 0.5F);
  }
  return amax / high;
}

// Calls visit(index of the scale, first element, end) for every group; stops at a failure.
template <class Visit>
Status for_each_group(const Shape& shape, const Grid& grid, Visit&& visit) {
  const std::int64_t k = shape[1];
  if (k == 0) return {};
  for (std::int64_t n = 0; n < shape[0]; ++n) {
    for (std::int64_t g = 0; g < grid.per_row; ++g) {
      const std::int64_t begin = n * k + g * grid.group;
      const std::int64_t end = g + 1 == grid.per_row ? (n + 1) * k : begin + grid.group;
      MOESAIC_RETURN_IF_ERROR(visit(n * grid.per_row + g, begin, end));
    }
  }
  return {};
}

}  // namespace

float int8_row_scale(float amax) { return amax > 0.0F ? amax / 127.0F : 1.0F; }

Status quantize_int_group(ConstTensorView x, const IntGroupFormat& format, TensorView codes,
                          TensorView scale) {
  MOESAIC_RETURN_IF_ERROR(expect_bits(format.bits));
  MOESAIC_ASSIGN_OR_RETURN(const Grid grid, grid_of("x", x, format.group));
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"x", x, kPlainFloats, x.shape},
      {"codes", codes, accept(DType::kI8), x.shape, true},
      {"scale", scale, kPlainFloats, {x.dim(0), grid.per_row}, true},
  }));
  MOESAIC_RETURN_IF_ERROR(expect_finite("x", x));
  const int high = (1 << (format.bits - 1)) - 1;
  return for_each_group(
      x.shape, grid, [&](std::int64_t g, std::int64_t begin, std::int64_t end) -> Status {
        const Range range = range_of(x, begin, end);
        MOESAIC_ASSIGN_OR_RETURN(const float s,
                                 store_scale(scale, g, symmetric_scale(range, format.rule, high)));
        for (std::int64_t i = begin; i < end; ++i) {
          const float q = i8_from_f32(load_as_f32(x.data, x.dtype, i) / s);
          codes.as<std::int8_t>()[i] = static_cast<std::int8_t>(
              std::clamp(q, static_cast<float>(-high - 1), static_cast<float>(high)));
        }
        return {};
      });
}

Status refit_int_scales(ConstTensorView x, ConstTensorView codes, std::int64_t group,
                        TensorView scale) {
  MOESAIC_ASSIGN_OR_RETURN(const Grid grid, grid_of("x", x, group));
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"x", x, kPlainFloats, x.shape},
      {"codes", codes, accept(DType::kI8), x.shape},
      {"scale", scale, kPlainFloats, {x.dim(0), grid.per_row}, true},
  }));
  return for_each_group(
      x.shape, grid, [&](std::int64_t g, std::int64_t begin, std::int64_t end) -> Status {
        double with_codes = 0, squares = 0;
        for (std::int64_t i = begin; i < end; ++i) {
          const double q = codes.as<std::int8_t>()[i];
          with_codes += q * static_cast<double>(load_as_f32(x.data, x.dtype, i));
          squares += q * q;
        }
        const auto best = static_cast<float>(squares > 0 ? with_codes / squares : 0.0);
        return best > 0 ? store_scale(scale, g, best).status() : Status();
      });
}

Status quantize_uint_group(ConstTensorView x, const IntGroupFormat& format, TensorView codes,
                           TensorView scale, TensorView zeros) {
  MOESAIC_RETURN_IF_ERROR(expect_bits(format.bits));
  MOESAIC_ASSIGN_OR_RETURN(const Grid grid, grid_of("x", x, format.group));
  const Shape grid_shape{x.dim(0), grid.per_row};
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"x", x, kPlainFloats, x.shape},
      {"codes", codes, accept(DType::kU8), x.shape, true},
      {"scale", scale, kPlainFloats, grid_shape, true},
      {"zeros", zeros, accept(DType::kU8), grid_shape, true},
  }));
  MOESAIC_RETURN_IF_ERROR(expect_finite("x", x));
  const auto largest = static_cast<float>((1 << format.bits) - 1);
  return for_each_group(
      x.shape, grid, [&](std::int64_t g, std::int64_t begin, std::int64_t end) -> Status {
        const auto [low, high] = range_of(x, begin, end);
        // Halves first: high - low may overflow where the scale does not.
        const float step = (high / largest) - (low / largest);
        MOESAIC_ASSIGN_OR_RETURN(const float s, store_scale(scale, g, step));
        const float z = std::clamp(round_to_even(std::min(-low / s, largest)), 0.0F, largest);
        zeros.as<std::uint8_t>()[g] = static_cast<std::uint8_t>(z);
        for (std::int64_t i = begin; i < end; ++i) {
          // At most one step outside the range, by rounding of s: clamp before rounding.
          const float q =
              std::clamp(load_as_f32(x.data, x.dtype, i) / s, -2 * largest, 2 * largest);
          codes.as<std::uint8_t>()[i] =
              static_cast<std::uint8_t>(std::clamp(round_to_even(q) + z, 0.0F, largest));
        }
        return {};
      });
}

Status dequantize_int_group(ConstTensorView codes, ConstTensorView scale, ConstTensorView zeros,
                            std::int64_t group, TensorView out) {
  MOESAIC_ASSIGN_OR_RETURN(const Grid grid, grid_of("codes", codes, group));
  const Shape grid_shape{codes.dim(0), grid.per_row};
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"codes", codes, accept(DType::kI8, DType::kU8), codes.shape},
      {"scale", scale, kPlainFloats, grid_shape},
      {"out", out, kPlainFloats, codes.shape, true},
  }));
  if (zeros.present()) {
    MOESAIC_RETURN_IF_ERROR(check_arguments({
        {"zeros", zeros, accept(DType::kU8), grid_shape},
        {"out", out, kPlainFloats, codes.shape, true},
    }));
  }
  return for_each_group(
      codes.shape, grid, [&](std::int64_t g, std::int64_t begin, std::int64_t end) -> Status {
        const float s = load_as_f32(scale.data, scale.dtype, g);
        int z = zeros.present() ? int{zeros.as<std::uint8_t>()[g]} : 0;
        if (MOESAIC_FAULT(quant_zero_point_sign)) z = -z;
        for (std::int64_t i = begin; i < end; ++i) {
          const int q = codes.dtype == DType::kI8 ? int{codes.as<std::int8_t>()[i]}
                                                  : int{codes.as<std::uint8_t>()[i]};
          store_from_f32(out.data, out.dtype, i, static_cast<float>(q - z) * s);
        }
        return {};
      });
}

}  // namespace moesaic::quant
