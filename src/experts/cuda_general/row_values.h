// Rows of quantised activations as the general experts read them: F32 values, code times scale.
// Host and device, so that every case is tested without a GPU: the codes and scales of
// ref_quantize_row (experts/reference/operand.h), bit for bit, but for NaN, which stays NaN in e4m3
// and e2m1. The product is rounded once, to F32.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/group_values.h"
#include "moesaic/quant.h"
#include "quant/compute_scheme.h"

#ifdef __CUDACC__
#define MOESAIC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOESAIC_HOST_DEVICE inline
#endif

namespace moesaic::cuda {

// What an OperandQuant of activations says of a row.
struct ValueRule {
  enum class Codes : std::uint8_t { kE4m3, kI8, kForm };
  Codes codes = Codes::kE4m3;
  RowForm form = RowForm::kMx8Values;  // kForm: kMx8Values, kMx4Values or kNv4Values
  bool power_of_two = false;           // kE4m3 in groups: scales are rounded up to one
  bool fixed = false;        // the expert's stored scale: of kE4m3 the only one, else an outer one
  std::int64_t columns = 0;  // that share a scale; 0: the whole row
};

// Empty: activations that are not quantised.
inline std::optional<ValueRule> value_rule(const OperandQuant& a) {
  ValueRule rule;
  rule.fixed = quant::has_static_scale(a);
  if (a.granularity == ScaleGranularity::kNone) return std::nullopt;
  if (a.granularity == ScaleGranularity::kGroup) rule.columns = a.block_k;
  if (a.dtype == DType::kI8) {
    rule.codes = ValueRule::Codes::kI8;
  } else if (a.scale_format == ScaleFormat::kE4M3) {
    rule.codes = ValueRule::Codes::kForm;
    rule.form = RowForm::kNv4Values;
  } else if (a.rule != ExponentRule::kNone) {
    rule.codes = ValueRule::Codes::kForm;
    rule.form = a.dtype == DType::kF8E4M3 ? RowForm::kMx8Values : RowForm::kMx4Values;
  } else {
    rule.power_of_two = a.scale_format == ScaleFormat::kE8M0;
  }
  return rule;
}

struct ValueScale {
  float scale = 1, to_codes = 1;
};

// Of columns with largest magnitude amax; NaN of int8 codes only, none of which is one. fixed: the stored scale, where the rule has one.
MOESAIC_HOST_DEVICE ValueScale value_scale(const ValueRule& rule, float amax, float fixed) {
  using group_values_bits::bits_of, group_values_bits::float_of;
  if (rule.codes == ValueRule::Codes::kI8) return {amax == 0.0F ? 1.0F : amax / 127.0F, 1.0F};
  if (rule.codes == ValueRule::Codes::kForm) {
    const GroupScale g = group_scale(rule.form, amax, rule.fixed ? 1.0F / fixed : 1.0F);
    return {g.scale, g.to_codes};
  }
  if (rule.fixed) return {fixed, 1.0F / fixed};
  constexpr float kSmallestOfRow = 1.0F / (448.0F * 512.0F);
  if (rule.columns == 0) return {fmaxf(amax / 448.0F, kSmallestOfRow), 1.0F};
  const float scale = fmaxf(amax, 1e-10F) / 448.0F;
  if (!rule.power_of_two) return {scale, 1.0F};
  return {float_of((bits_of(fmaxf(scale, 1e-10F)) + 0x007FFFFFU) & 0x7F800000U), 1.0F};
}

// The value that x is rounded to.
MOESAIC_HOST_DEVICE float row_value(const ValueRule& rule, const ValueScale& s, float fixed,
                                    float x) {
  using group_values_bits::product;
  if (rule.codes == ValueRule::Codes::kForm) {
    if (x != x) return x;  // also where nothing else gives its group a scale
    const float value = group_value(rule.form, {s.to_codes, s.scale}, x);
    return rule.fixed ? product(value, fixed) : value;
  }
  if (rule.codes == ValueRule::Codes::kI8) {
    const float v = x / s.scale;
    const float near = v == v ? fminf(fmaxf(v, -128.0F), 127.0F) : 0.0F;
    constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: sums with it are whole numbers
    return product((near + kMagic) - kMagic, s.scale);
  }
  return product(nearest_e4m3(rule.fixed ? product(x, s.to_codes) : x / s.scale), s.scale);
}

}  // namespace moesaic::cuda

#undef MOESAIC_HOST_DEVICE
