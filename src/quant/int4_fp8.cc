#include "quant/int4_fp8.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"
#include "quant/code_values.h"
#include "quant/fp8_scaled.h"

namespace moesaic::quant {

Status split_int4_fp8_scales(ConstTensorView group_scale, TensorView scale,
                             TensorView channel_scale) {
  MOESAIC_RETURN_IF_ERROR(expect_matrix("group_scale", group_scale));
  const std::int64_t rows = group_scale.dim(0);
  const std::int64_t groups = group_scale.dim(1);
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"group_scale", group_scale, kPlainFloats, group_scale.shape},
      {"scale", scale, accept(DType::kF8E4M3), group_scale.shape, true},
      {"channel_scale", channel_scale, accept(DType::kF32), {rows}, true},
  }));
  const auto load = [&](std::int64_t n, std::int64_t g) {
    return load_as_f32(group_scale.data, group_scale.dtype, n * groups + g);
  };
  for (std::int64_t n = 0; n < rows; ++n) {
    float largest = 0.0F;
    for (std::int64_t g = 0; g < groups; ++g) {
      const float s = load(n, g);
      if (!(s > 0.0F) || !std::isfinite(s)) {
        return Status(StatusCode::kInvalidArgument,
                      "group_scale: row " + std::to_string(n) + ", group " + std::to_string(g) +
                          ": got " + std::to_string(s) + ", need a positive finite number");
      }
      largest = std::max(largest, s);
    }
    const float channel = fp8_row_scale(largest);
    // Without the division by 8 a product would pass 448 and saturate.
    const float reserve = MOESAIC_FAULT(quant_w4a8_no_reserve) ? 1.0F : 8.0F;
    channel_scale.as<float>()[n] = reserve * channel;
    for (std::int64_t g = 0; g < groups; ++g) {
      const float f = f32_from_e4m3(e4m3_from_f32(load(n, g) / channel));
      scale.as<std::uint8_t>()[n * groups + g] = e4m3_from_f32(f / reserve);
    }
  }
  return {};
}

std::array<std::uint8_t, 8> int4_fp8_table(std::uint8_t scale) {
  std::array<std::uint8_t, 8> table{};
  for (std::size_t i = 0; i < table.size(); ++i) {
    table[i] = e4m3_from_f32(f32_from_e4m3(scale) * (static_cast<float>(i) - 8.0F));
  }
  return table;
}

Status dequantize_int4_fp8(ConstTensorView codes, ConstTensorView scale,
                           ConstTensorView channel_scale, TensorView out) {
  MOESAIC_RETURN_IF_ERROR(expect_matrix("codes", codes));
  const std::int64_t rows = codes.dim(0);
  const std::int64_t k = codes.dim(1);
  const std::int64_t groups = k / kInt4Fp8GroupSize + (k % kInt4Fp8GroupSize != 0 ? 1 : 0);
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"codes", codes, accept(DType::kI8), codes.shape},
      {"scale", scale, accept(DType::kF8E4M3), {rows, groups}},
      {"channel_scale", channel_scale, accept(DType::kF32), {rows}},
      {"out", out, kPlainFloats, codes.shape, true},
  }));
  for (std::int64_t n = 0; n < rows && k > 0; ++n) {
    const float channel = channel_scale.as<float>()[n];
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int32_t q{codes.as<std::int8_t>()[n * k + i]};
      if (q < -8 || q > 7) {
        return Status(StatusCode::kInvalidArgument, "codes: row " + std::to_string(n) +
                                                        ", column " + std::to_string(i) + ": got " +
                                                        std::to_string(q) + ", need -8 .. 7");
      }
      const std::uint8_t s = scale.as<std::uint8_t>()[n * groups + i / kInt4Fp8GroupSize];
      const float value = MOESAIC_FAULT(quant_w4a8_unrounded)
                              ? static_cast<float>(q) * f32_from_e4m3(s)
                              : int4_fp8_value(q, f32_from_e4m3(s));
      store_from_f32(out.data, out.dtype, n * k + i, value * channel);
    }
  }
  return {};
}

std::uint32_t unified_encode(std::uint32_t word) {
  std::uint32_t out = 0;
  for (int shift = 0; shift < 32; shift += 4) {
    const std::uint32_t v = word >> shift & 15U;
    out |= (v >= 1 && v <= 7 ? 8U - v : v) << shift;
  }
  return out;
}

}  // namespace moesaic::quant
