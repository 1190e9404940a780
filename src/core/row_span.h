// What a view whose rows lie apart touches, for checks of overlaps, which know contiguous views only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moesaic/tensor.h"

namespace moesaic {

// x: [M >= 1, N], rows at any distance, elements of a row side by side.
inline ConstTensorView row_span(const ConstTensorView& x) {
  const std::int64_t last_row = (x.dim(0) - 1) * x.strides[0];
  const std::int64_t low = std::min<std::int64_t>(0, last_row);
  const std::int64_t high = std::max<std::int64_t>(0, last_row) + x.dim(1);
  return {x.data + low * (dtype_bits(x.dtype) / 8), x.dtype, {high - low}, x.device};
}

}  // namespace moesaic
