// The E8M0 scales of a matrix as exponent fields of bf16 factors (codes_e2m1.h, codes_e4m3.h). A row
// with a scale that has no factor, or whose products would not be exact, is shifted as a whole: its
// sums are multiplied by a power of two in the end. Host code.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::cuda {

struct FactorRange {
  int base;            // field of exponent 0
  int least, largest;  // E8M0 codes that need no shift
};
extern const FactorRange kE2m1Factors, kE4m3Factors;

struct ShiftedExponents {
  std::vector<std::uint8_t> fields;  // [rows, columns / 32]
  std::vector<float> factors;        // [rows]: what finished sums are multiplied by
};

// weight [rows, columns] of e2m1 (two per byte) or e4m3; scale [rows, columns / 32] E8M0. Groups of
// zeros may have any scale. kUnsupported (with `field` in the text): scales of one row further apart
// than bf16 reaches.
Result<ShiftedExponents> shift_exponents(std::string_view field, const FactorRange& range,
                                         const ConstTensorView& weight,
                                         const ConstTensorView& scale);

}  // namespace moesaic::cuda
