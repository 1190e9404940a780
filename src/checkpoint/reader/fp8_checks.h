// Sanity of FP8-block weights: what no intact checkpoint contains and every later stage would turn
// into silent NaN. Source: docs/spec/checkpoints.md section 6.5.
#pragma once

#include <cstdint>
#include <string_view>

#include "moesaic/status.h"
#include "quant/block_scales.h"

namespace moesaic::checkpoint {

// weights [rows, cols] e4m3 bytes, scales [ceil(rows/n), ceil(cols/k)] for blocks of n x k; both
// contiguous.
// kCorruptFile names the tensor and row, column of the first offence: an e4m3 NaN code (0x7F,
// 0xFF); a scale that is NaN, infinite or negative, or zero while its tile is not all zero.
// first_row, first_col: place of the slice in the stored tensor, for the message.
struct Fp8BlockView {
  std::string_view weight_name, scale_name;
  const std::uint8_t* weights;
  const float* scales;
  std::int64_t rows, cols;
  std::int64_t first_row = 0, first_col = 0;
  quant::BlockShape block = {};
};
Status check_fp8_block(const Fp8BlockView& view);

}  // namespace moesaic::checkpoint
