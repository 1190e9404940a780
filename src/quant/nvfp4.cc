#include "quant/nvfp4.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/grouped_rows.h"

namespace moesaic::quant {
namespace {

Status check_nvfp4(std::string_view name, const ConstTensorView& x, bool x_written,
                   const ConstTensorView& q, const ConstTensorView& scale) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape grid, grouped_shape(name, x.shape, kNvfp4GroupSize));
  return check_arguments({
      {name, x, kPlainFloats, x.shape, x_written},
      {"q", q, accept(DType::kF4E2M1), x.shape, !x_written},
      {"scale", scale, accept(DType::kF8E4M3), grid, !x_written},
  });
}

Status expect_multiplier(std::string_view field, float value) {
  if (value > 0.0F && std::isfinite(value)) return {};
  return Status(StatusCode::kInvalidArgument,
                std::string(field) + ": got " +
                    (std::isnan(value) ? std::string("NaN") : std::to_string(value)) +
                    ", need a positive finite number");
}

}  // namespace

float nvfp4_quant_multiplier(float amax) {
  constexpr float kLargest = 0x1p100F;
  if (!(amax > 0.0F)) return 1.0F;
  return std::min(kE2m1Max * kE4m3Max / amax, kLargest);
}

std::uint8_t nvfp4_block_scale(float amax, float gscale) {
  return e4m3_from_f32(gscale * (amax / kE2m1Max));
}

void ref_quantize_nvfp4_row(const float* x, std::int64_t k, float gscale, std::uint8_t* q,
                            std::uint8_t* scale) {
  for (std::int64_t g = 0; g < k / kNvfp4GroupSize; ++g, x += kNvfp4GroupSize) {
    float amax = 0.0F;
    for (std::int64_t i = 0; i < kNvfp4GroupSize; ++i) amax = std::max(amax, std::abs(x[i]));
    const std::uint8_t byte = nvfp4_block_scale(amax, gscale);
    scale[g] = byte;
    std::uint8_t* codes = q + g * (kNvfp4GroupSize / 2);
    const float multiplier = byte == 0 ? 0.0F : gscale / f32_from_e4m3(byte);
    for (std::int64_t i = 0; i < kNvfp4GroupSize; ++i) {
      // A block of scale 0 gets codes 0, without the sign that -x * 0 would keep.
      set_nibble(codes, i, byte == 0 ? std::uint8_t{0} : e2m1_from_f32(x[i] * multiplier));
    }
  }
}

Status quantize_nvfp4(ConstTensorView x, float gscale, TensorView q, TensorView scale) {
  MOESAIC_RETURN_IF_ERROR(check_nvfp4("x", x, false, q, scale));
  MOESAIC_RETURN_IF_ERROR(expect_multiplier("gscale", gscale));
  MOESAIC_RETURN_IF_ERROR(expect_finite("x", x));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t groups, scale.shape.num_elements());
  for_groups<kNvfp4GroupSize>(x, groups, [&](const float* values, std::int64_t g) {
    ref_quantize_nvfp4_row(values, kNvfp4GroupSize, gscale,
                           q.as<std::uint8_t>() + g * (kNvfp4GroupSize / 2),
                           scale.as<std::uint8_t>() + g);
  });
  return {};
}

Status dequantize_nvfp4(ConstTensorView q, ConstTensorView scale, float global_scale,
                        TensorView out) {
  MOESAIC_RETURN_IF_ERROR(check_nvfp4("out", out, true, q, scale));
  MOESAIC_RETURN_IF_ERROR(expect_multiplier("global_scale", global_scale));
  const float s2 =
      MOESAIC_FAULT(quant_nvfp4_reciprocal_global) ? 1.0F / global_scale : global_scale;
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t groups, scale.shape.num_elements());
  const std::int64_t per_row = scale.dim(scale.rank() - 1);
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::uint8_t byte = scale.as<std::uint8_t>()[g];
    const float s = f32_from_e4m3(byte);
    if (!(s >= 0.0F) || (byte & 0x80U) != 0) {
      return Status(StatusCode::kInvalidArgument,
                    "scale: row " + std::to_string(g / per_row) + ", block " +
                        std::to_string(g % per_row) + ": got " +
                        (std::isnan(s) ? std::string("NaN") : std::to_string(s)) +
                        ", need a number >= 0");
    }
    for (std::int64_t i = g * kNvfp4GroupSize; i < (g + 1) * kNvfp4GroupSize; ++i) {
      store_from_f32(out.data, out.dtype, i, load_as_f32(q.data, q.dtype, i) * s * s2);
    }
  }
  return {};
}

}  // namespace moesaic::quant
