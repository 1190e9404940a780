#include "quant/int4_fp8.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"
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
      if (!(s >= 0.0F) || !std::isfinite(s)) {
        return Status(std::isfinite(s) ? StatusCode::kUnsupported : StatusCode::kInvalidArgument,
                      "group_scale: row " + std::to_string(n) + ", group " + std::to_string(g) +
                          ": got " + std::to_string(s) +
                          ", need a finite number that is not negative (int4-fp8)");
      }
      largest = std::max(largest, s);
    }
    // The published floor, but for rows of which it would take bits.
    const bool small = largest > 0.0F && largest < 8 * kFp8RowMinScale;
    const float channel = small ? std::max(largest / kE4m3Max, std::numeric_limits<float>::min())
                                : fp8_row_scale(largest);
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

}  // namespace moesaic::quant
