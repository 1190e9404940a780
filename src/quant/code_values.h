// What a stored code of a weight stands for, before any scale.
#pragma once

#include <array>
#include <cstdint>

#include "moesaic/quant.h"

namespace moesaic::quant {

// The 16 values of a 4-bit format (F4, I4, U4 or a table), by code. Exact in bf16 but for tables.
using CodeValues = std::array<float, 16>;
CodeValues code_values(const OperandQuant& weight);
// The same with entries of a table rounded to bf16, which is what schemes of bf16 arithmetic
// multiply with.
CodeValues code_values_bf16(const OperandQuant& weight);

// int4 with e4m3 group scales.
inline bool rounds_scaled_codes(const OperandQuant& weight) {
  return weight.dtype == DType::kI4 && weight.scale_format == ScaleFormat::kE4M3;
}
// For such weights: the value of e4m3(scale * code), the operand that the scheme
// multiplies with. scale is the value of an e4m3 code.
float int4_fp8_value(int code, float scale);

}  // namespace moesaic::quant
