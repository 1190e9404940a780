#include "quant/fp8_group.h"

#include <algorithm>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"

namespace moesaic::quant {

float fp8_group_scale(float amax, ScaleRounding rounding) {
  const float floor = MOESAIC_FAULT(quant_no_amax_floor) ? 0.0F : kFp8GroupEps;
  const float scale = std::max(amax, floor) / kE4m3Max;
  if (rounding == ScaleRounding::kNone) return scale;
  return f32_from_e8m0(e8m0_from_scale_ceil(std::max(scale, kFp8GroupEps)));
}

void ref_quantize_fp8_row(const float* x, std::int64_t k, std::int64_t group,
                          ScaleRounding rounding, std::uint8_t* q, float* scales) {
  for (std::int64_t g = 0; g * group < k; ++g, x += group, q += group) {
    const std::int64_t n = std::min(group, k - g * group);
    scales[g] = fp8_group_scale(max_abs(x, n), rounding);
    // e4m3_from_f32 saturates, which is the clamp to +-448.
    for (std::int64_t i = 0; i < n; ++i) q[i] = e4m3_from_f32(x[i] / scales[g]);
  }
}

}  // namespace moesaic::quant
