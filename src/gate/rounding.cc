#include "gate/rounding.h"

#include <fmt/format.h>

#include "core/fault.h"
#include "core/refusal.h"
#include "numerics/float_codec.h"

namespace moesaic::gate {

float rounded_to(float v, DType dtype) {
  if (dtype == DType::kBF16) return f32_from_bf16(bf16_from_f32(v));
  return dtype == DType::kF16 ? f32_from_f16(f16_from_f32(v)) : v;
}

void LogitRounding::apply(float* logits_f32, std::int64_t count) const {
  if (none() || MOESAIC_FAULT(gate_logits_stay_unrounded)) return;
  for (std::int64_t i = 0; i < count; ++i) logits_f32[i] = of(logits_f32[i]);
}

std::string describe(const LogitRounding& r) {
  std::string text = "fp32 sums";
  if (r.linear != DType::kF32) text += fmt::format(" rounded to {}", dtype_name(r.linear));
  if (r.logits == DType::kF32 || r.logits == r.linear) return text;
  return text + fmt::format("{} to {}", r.linear != DType::kF32 ? ", then" : " rounded",
                            dtype_name(r.logits));
}

Status check_linear_input(DType x_dtype, const LogitRounding& r) {
  if (r.linear == DType::kF32 || x_dtype == r.linear) return {};
  return unsupported(fmt::format(
      "hidden_states: got {}, need {}: a gate without force_fp32_compute takes rows of its "
      "weight's dtype",
      dtype_name(x_dtype), dtype_name(r.linear)));
}

}  // namespace moesaic::gate
