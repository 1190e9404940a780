// What a view whose rows lie apart touches, for checks of overlaps, which know contiguous views only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/checked.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// x: [M >= 1, N], rows at any distance, elements of a row side by side. kLimitExceeded for rows so far
// apart that no memory has them.
inline Result<ConstTensorView> row_span(std::string_view field, const ConstTensorView& x) {
  constexpr std::int64_t kMost = std::int64_t{1} << 58;
  const auto last_row = checked_mul(x.dim(0) - 1, x.strides[0]);
  if (!last_row || *last_row > kMost || *last_row < -kMost) {
    return Status(StatusCode::kLimitExceeded,
                  std::string(field) + ": strides reach beyond 2^58 elements");
  }
  const std::int64_t low = std::min<std::int64_t>(0, *last_row);
  const std::int64_t high = std::max<std::int64_t>(0, *last_row) + x.dim(1);
  return ConstTensorView(x.data + low * (dtype_bits(x.dtype) / 8), x.dtype, {high - low}, x.device);
}

}  // namespace moesaic
