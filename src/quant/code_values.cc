#include "quant/code_values.h"

#include <algorithm>

#include "core/fault.h"
#include "numerics/float_codec.h"
#include "numerics/integer.h"
#include "quant/bnb.h"

namespace moesaic::quant {

CodeValues code_values(const OperandQuant& weight) {
  CodeValues values{};
  if (weight.table == CodeTable::kNf4 || weight.table == CodeTable::kFp4) {
    std::ranges::copy(bnb_values(weight.table), values.begin());
    return values;
  }
  for (std::size_t c = 0; c < values.size(); ++c) {
    const auto code = static_cast<std::uint8_t>(c);
    if (weight.table == CodeTable::kIq4Nl) {
      values[c] = kIq4NlValues[c];
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
  const float product = static_cast<float>(code) * scale;
  return MOESAIC_FAULT(quant_w4a8_unrounded) ? product : f32_from_e4m3(e4m3_from_f32(product));
}

}  // namespace moesaic::quant
