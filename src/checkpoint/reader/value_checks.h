// Sanity of scales and codes as they are read: what no intact checkpoint contains and every later
// stage would turn into silent NaN. kCorruptFile names the tensor and row, column of the first
// offence. Source: docs/spec/checkpoints.md section 6.5.
#pragma once

#include <cstdint>
#include <string_view>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Where a slice begins in its stored tensor, for messages. `row_step`: distance of its rows in the
// tensor.
struct Place {
  std::string_view name;
  std::int64_t first_row = 0, first_col = 0, row_step = 1;

  std::int64_t row(std::int64_t r) const { return first_row + r * row_step; }
};

// rows x cols bytes, contiguous. e4m3 NaN codes (0x7F, 0xFF).
Status check_e4m3_codes(const Place& place, const std::uint8_t* codes, std::int64_t rows,
                        std::int64_t cols);
// E8M0: 0xFF.
Status check_e8m0_scales(const Place& place, const std::uint8_t* scales, std::int64_t rows,
                         std::int64_t cols);
// Of integer codes a group's scale may be negative: AutoRound gives the end with one code more to
// the side that needs it.
enum class ScaleSigns : std::uint8_t { kPositive, kEither };
// Every scale finite, of those signs and not 0; `zero_allowed(row, col)` says whether a 0 there is
// harmless.
template <class ZeroAllowed>
Status check_f32_scales(const Place& place, const float* scales, std::int64_t rows,
                        std::int64_t cols, const ZeroAllowed& zero_allowed,
                        ScaleSigns signs = ScaleSigns::kPositive);

Status bad_scale(const Place& place, float scale, std::int64_t row, std::int64_t col,
                 ScaleSigns signs = ScaleSigns::kPositive);

template <class ZeroAllowed>
Status check_f32_scales(const Place& place, const float* scales, std::int64_t rows,
                        std::int64_t cols, const ZeroAllowed& zero_allowed, ScaleSigns signs) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const float s = scales[r * cols + c];
      const float size = signs == ScaleSigns::kEither && s < 0 ? -s : s;
      if (size > 0 && size <= 3.4028234663852886e38F) continue;  // NaN fails both
      if (s == 0 && zero_allowed(r, c)) continue;
      return bad_scale(place, s, r, c, signs);
    }
  }
  return {};
}

}  // namespace moesaic::checkpoint
