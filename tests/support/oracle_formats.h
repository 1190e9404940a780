// Number formats for the oracle: by definition rather than by bit tricks, and without src/.
#pragma once

#include <cstdint>

#include "moesaic/quant.h"
#include "moesaic/tensor.h"

namespace moesaic::test {

// Nearest, ties to even. F32, BF16, F16.
double round_to(DType dtype, double v);
// Saturating.
double e4m3_round(double v);
double e2m1_round(double v);
// The code of e4m3_round(v).
std::uint8_t e4m3_code(double v);

// Element i of a contiguous tensor of weights, scales or activations; 4-bit codes lie two per byte,
// the low nibble first.
double element(const ConstTensorView& t, std::int64_t i);
// What 4-bit code i means in a table that is not kNone.
double table_value(CodeTable table, const ConstTensorView& t, std::int64_t i);

}  // namespace moesaic::test
