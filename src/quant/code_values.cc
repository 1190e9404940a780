#include "quant/code_values.h"

#include "numerics/float_codec.h"
#include "numerics/integer.h"

namespace moesaic::quant {
namespace {

// bitsandbytes fp4: magnitudes in the order of their codes, bit 3 is the sign.
constexpr std::array<float, 8> kFp4Magnitudes = {0.0F,        0.005208333F, 0.6666667F,  1.0F,
                                                 0.33333334F, 0.5F,         0.16666667F, 0.25F};

}  // namespace

CodeValues code_values(const OperandQuant& weight) {
  if (weight.table == CodeTable::kNf4) return kNf4Values;
  CodeValues values{};
  for (std::size_t c = 0; c < values.size(); ++c) {
    const auto code = static_cast<std::uint8_t>(c);
    if (weight.table == CodeTable::kIq4Nl) {
      values[c] = kIq4NlValues[c];
    } else if (weight.table == CodeTable::kFp4) {
      values[c] = c < 8 ? kFp4Magnitudes[c] : -kFp4Magnitudes[c - 8];
    } else if (weight.dtype == DType::kF4E2M1) {
      values[c] = f32_from_e2m1(code);
    } else if (weight.dtype == DType::kI4) {
      values[c] = static_cast<float>(i4_from_nibble(code));
    } else {
      values[c] = static_cast<float>(code);
    }
  }
  return values;
}

CodeValues code_values_bf16(const OperandQuant& weight) {
  CodeValues values = code_values(weight);
  for (float& v : values) v = f32_from_bf16(bf16_from_f32(v));
  return values;
}

float int4_fp8_value(int code, float scale) {
  return f32_from_e4m3(e4m3_from_f32(static_cast<float>(code) * scale));
}

}  // namespace moesaic::quant
