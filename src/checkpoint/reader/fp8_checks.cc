#include "checkpoint/reader/fp8_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/config/quant_config.h"
#include "checkpoint/container/names.h"
#include "core/checked.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::uint8_t kMagnitude = 0x7F;  // all but the sign; as a value it is e4m3's NaN

// Branch-free over a row, so that the compiler can vectorise: these checks read every weight.
bool has_nan_code(const std::uint8_t* row, std::int64_t n) {
  std::uint8_t found = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    found = static_cast<std::uint8_t>(found | ((row[i] & kMagnitude) == kMagnitude ? 1 : 0));
  }
  return found != 0;
}

bool tile_is_zero(const Fp8BlockView& v, std::int64_t row, std::int64_t col) {
  const std::int64_t row_end = std::min(row + v.block.n, v.rows);
  const std::int64_t col_end = std::min(col + v.block.k, v.cols);
  for (std::int64_t r = row; r < row_end; ++r) {
    for (std::int64_t c = col; c < col_end; ++c) {
      if ((v.weights[r * v.cols + c] & kMagnitude) != 0) return false;
    }
  }
  return true;
}

Status check_codes(const Fp8BlockView& v) {
  for (std::int64_t r = 0; r < v.rows; ++r) {
    const std::uint8_t* row = v.weights + r * v.cols;
    if (!has_nan_code(row, v.cols)) continue;
    const std::int64_t c =
        std::find_if(row, row + v.cols,
                     [](std::uint8_t b) { return (b & kMagnitude) == kMagnitude; }) -
        row;
    return {StatusCode::kCorruptFile,
            fmt::format("{}: got the NaN code 0x{:02X} at [{}, {}], need finite e4m3 values",
                        quote_name(v.weight_name), row[c], v.first_row + r, v.first_col + c)};
  }
  return {};
}

Status check_scales(const Fp8BlockView& v) {
  const std::int64_t grid_cols = ceil_div(v.cols, v.block.k);
  const std::int64_t grid_rows = ceil_div(v.rows, v.block.n);
  for (std::int64_t r = 0; r < grid_rows; ++r) {
    for (std::int64_t c = 0; c < grid_cols; ++c) {
      const float scale = v.scales[r * grid_cols + c];
      if (std::isfinite(scale) && scale > 0) continue;
      if (scale == 0 && tile_is_zero(v, r * v.block.n, c * v.block.k)) continue;
      return {StatusCode::kCorruptFile,
              fmt::format("{}: got scale {} at [{}, {}], need a finite number > 0 (0 only over "
                          "weights that are all zero)",
                          quote_name(v.scale_name), scale, v.first_row / v.block.n + r,
                          v.first_col / v.block.k + c)};
    }
  }
  return {};
}

}  // namespace

Status check_fp8_block(const Fp8BlockView& view) {
  if (MOESAIC_FAULT(checkpoint_accept_bad_fp8)) return {};
  MOESAIC_RETURN_IF_ERROR(check_codes(view));
  return check_scales(view);
}

}  // namespace moesaic::checkpoint
