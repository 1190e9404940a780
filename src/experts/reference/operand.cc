#include "experts/reference/operand.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/checked.h"
#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"
#include "quant/fp8_group.h"
#include "quant/fp8_scaled.h"
#include "quant/int_group.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::experts {
namespace {

float e4m3_value(float x) {
  return f32_from_e4m3(e4m3_from_f32(std::clamp(x, -kE4m3Max, kE4m3Max)));
}
float e2m1_value(float x) {
  return f32_from_e2m1(e2m1_from_f32(std::clamp(x, -kE2m1Max, kE2m1Max)));
}

// One group of a microscaling format; returns its scale.
float quantize_mx_group(const OperandQuant& a, float* x, std::int64_t n) {
  const bool fp8 = a.dtype == DType::kF8E4M3;
  ExponentRule rule = a.rule;
  if (MOESAIC_FAULT(ref_experts_other_exponent_rule)) rule = ExponentRule::kOcpFloor;
  const std::uint8_t exponent = quant::mx_scale(quant::max_abs(x, n), a.dtype, rule);
  const float scale = f32_from_e8m0(exponent);
  for (std::int64_t i = 0; i < n; ++i) {
    const float y = exponent == 0 ? 0.0F : x[i] / scale;
    x[i] = fp8 ? e4m3_value(y) : e2m1_value(y);
  }
  return scale;
}

// int8 with a scale per row (n: all of it) or group.
float quantize_int8(float* x, std::int64_t n) {
  const float scale = quant::int8_row_scale(quant::max_abs(x, n));
  for (std::int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(i8_from_f32(x[i] / scale));
  return scale;
}

float quantize_nvfp4_group(float gscale, float* x, std::int64_t n) {
  const float sf = f32_from_e4m3(quant::nvfp4_block_scale(quant::max_abs(x, n), gscale));
  const float factor = sf == 0.0F ? 0.0F : gscale / sf;
  for (std::int64_t i = 0; i < n; ++i) x[i] = e2m1_value(x[i] * factor);
  return sf;
}

RefOperand quantize_row(const OperandQuant& a, float input_scale, float* row, std::int64_t count,
                        float* scales, std::uint8_t* codes) {
  switch (a.granularity) {
    case ScaleGranularity::kGroup:
      break;
    case ScaleGranularity::kToken: {
      if (a.dtype == DType::kI8) {
        scales[0] = quantize_int8(row, count);
        return {row, scales, 0, 1.0F};
      }
      scales[0] = quant::fp8_row_scale(quant::max_abs(row, count));
      for (std::int64_t i = 0; i < count; ++i) row[i] = e4m3_value(row[i] / scales[0]);
      return {row, scales, 0, 1.0F};
    }
    case ScaleGranularity::kTensor: {
      const float inverse = 1.0F / input_scale;
      for (std::int64_t i = 0; i < count; ++i) row[i] = e4m3_value(row[i] * inverse);
      scales[0] = input_scale;
      return {row, scales, 0, 1.0F};
    }
    default:
      return {row, nullptr, 0, 1.0F};
  }
  if (a.dtype == DType::kI8) {
    for (std::int64_t begin = 0, g = 0; begin < count; begin += a.block_k, ++g) {
      scales[g] = quantize_int8(row + begin, std::min(a.block_k, count - begin));
      if (MOESAIC_FAULT(ref_experts_int8_scale_of_group_zero)) scales[g] = scales[0];
    }
    return {row, scales, a.block_k, 1.0F};
  }
  if (a.rule == ExponentRule::kNone && a.scale_format != ScaleFormat::kE4M3) {
    quant::ref_quantize_fp8_row(row, count, a.block_k,
                                a.scale_format == ScaleFormat::kE8M0
                                    ? quant::ScaleRounding::kCeilPowerOfTwo
                                    : quant::ScaleRounding::kNone,
                                codes, scales);
    for (std::int64_t i = 0; i < count; ++i) row[i] = f32_from_e4m3(codes[i]);
    return {row, scales, a.block_k, 1.0F};
  }
  const bool nvfp4 = a.scale_format == ScaleFormat::kE4M3;
  for (std::int64_t begin = 0, g = 0; begin < count; begin += a.block_k, ++g) {
    const std::int64_t n = std::min(a.block_k, count - begin);
    scales[g] = nvfp4 ? quantize_nvfp4_group(1.0F / input_scale, row + begin, n)
                      : quantize_mx_group(a, row + begin, n);
  }
  return {row, scales, a.block_k, nvfp4 ? input_scale : 1.0F};
}

}  // namespace

std::int64_t ref_max_scales(const OperandQuant& a, std::int64_t count) {
  return a.granularity == ScaleGranularity::kGroup ? ceil_div(count, a.block_k) : 1;
}

RefOperand ref_quantize_row(const OperandQuant& a, float input_scale, float* row,
                            std::int64_t count, float* scales, std::uint8_t* codes) {
  const bool nan = std::any_of(row, row + count, [](float x) { return std::isnan(x); });
  const RefOperand made = quantize_row(a, input_scale, row, count, scales, codes);
  // No code is one, so it stays in a scale.
  if (nan && made.scales != nullptr && !MOESAIC_FAULT(ref_experts_nan_is_a_number)) {
    scales[0] = std::numeric_limits<float>::quiet_NaN();
  }
  return made;
}

}  // namespace moesaic::experts
