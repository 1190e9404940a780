#include "checkpoint/reader/window.h"

#include <algorithm>
#include <utility>

#include "core/fault.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::checkpoint {
namespace {

// Tile by tile, so that both sides stay in cache.
template <class Element>
void transpose_elements(const std::byte* from_bytes, std::int64_t pitch, std::int64_t first,
                        std::int64_t step, std::int64_t rows, std::int64_t cols,
                        std::byte* to_bytes) {
  constexpr std::int64_t kTile = 64;  // 64 x 64 x 4 bytes: half of a 32 KiB first-level cache
  const auto* from = reinterpret_cast<const Element*>(from_bytes) + first;
  auto* to = reinterpret_cast<Element*>(to_bytes);
  for (std::int64_t c0 = 0; c0 < cols; c0 += kTile) {
    for (std::int64_t r0 = 0; r0 < rows; r0 += kTile) {
      for (std::int64_t r = r0; r < std::min(r0 + kTile, rows); ++r) {
        Element* row = to + r * cols;
        for (std::int64_t c = c0; c < std::min(c0 + kTile, cols); ++c) {
          row[c] = from[c * pitch + r * step];
        }
      }
    }
  }
}

// Gate and up of fused storages: halves of one linear, or its rows in turn.
void place_fused(const MlpSlice& slice, std::int64_t first, Window* gate, Window* up) {
  const std::int64_t i = slice.width;
  gate->rows_all = up->rows_all = 2 * i;
  if (is_interleaved(slice.storage)) {
    gate->first_row = up->first_row = 2 * first;
    if (MOESAIC_FAULT(checkpoint_skip_deinterleave)) {
      up->first_row += slice.count;
      return;
    }
    gate->row_step = up->row_step = 2;
    if (!MOESAIC_FAULT(checkpoint_interleaved_up_is_gate)) ++up->first_row;
    return;
  }
  if (!MOESAIC_FAULT(checkpoint_stacked_up_is_gate)) up->first_row += i;
  if (slice.storage == ExpertStorage::kPerExpertUpFirst &&
      !MOESAIC_FAULT(checkpoint_up_first_ignored)) {
    std::swap(gate->first_row, up->first_row);
  }
}

}  // namespace

MlpWindows windows_of(const MlpSlice& slice) {
  using enum Projection;
  const std::int64_t h = slice.hidden, i = slice.width;
  const std::int64_t first = MOESAIC_FAULT(checkpoint_skip_tp_offset) ? 0 : slice.first;
  MlpWindows w = {{kGate, kGate, i, h, first, slice.count, 0, h, 0},
                  {kUp, kUp, i, h, first, slice.count, 0, h, slice.gated ? slice.count : 0},
                  {kDown, kDown, h, i, 0, h, first, slice.count, 0}};
  if (is_fused(slice.storage)) {
    w.up.projection = kGate;
    place_fused(slice, first, &w.gate, &w.up);
  }
  w.gate.transposed = w.up.transposed = is_columnwise(slice.storage);
  w.down.transposed = w.gate.transposed || slice.storage == ExpertStorage::kFlat;
  if (MOESAIC_FAULT(checkpoint_swap_gate_up)) std::swap(w.gate.to, w.up.to);
  return w;
}

std::optional<std::int64_t> columns_per_element(StoredFormat format, TensorKind kind) {
  using enum StoredFormat;
  const bool weight = kind == TensorKind::kWeight, scale = kind == TensorKind::kScale;
  switch (format) {
    case kPlain:
    case kFp8Block:
    case kFp8Tensor:
    case kFp8Channel:
    case kInt8Channel:
    case kBnb8:
      if (weight) return 1;
      break;
    case kMxfp8:
      if (weight) return 1;
      if (scale) return quant::kMxGroupSize;
      break;
    case kMxfp4:
    case kMxfp4Linear:
      if (weight) return 2;
      if (scale) return quant::kMxGroupSize;
      break;
    case kNvfp4:
      if (weight) return 2;
      if (scale) return quant::kNvfp4GroupSize;
      break;
    case kBnb4:  // rows of bytes one after the other, in a tensor with one column
      if (weight) return 2;
      break;
    case kPacked:
    case kGptq:
    case kAwq:
    case kGguf:
      break;
  }
  return std::nullopt;
}

StoredPart part_of(const Window& w, std::int64_t columns_per_element, std::int64_t experts_before) {
  const std::int64_t all = w.cols_all / columns_per_element;
  const std::int64_t first = w.first_col / columns_per_element, cols = w.cols / columns_per_element;
  const std::int64_t base = w.first_row / w.row_step * w.row_step, span = w.rows * w.row_step;
  if (w.transposed) return {w.rows_all, {experts_before * all + first, cols, base, span}};
  return {all, {experts_before * w.rows_all + base, span, first, cols}};
}

Status read_rectangle(const ShardSet::Located& from, std::int64_t row_elements,
                      const Rectangle& part, std::byte* to) {
  const TensorInfo& info = *from.info;
  const std::int64_t element_bytes = dtype_bits(info.dtype) / 8;
  const std::int64_t cols = info.rank == 0 ? 1 : info.shape[info.rank - 1];
  const auto read = [&](const Rectangle& r, std::byte* dst) {
    return from.file->read_rows(info, r.first_row, r.rows, r.first_col, r.cols,
                                {dst, static_cast<std::size_t>(r.rows * r.cols * element_bytes)});
  };
  if (cols == row_elements || cols == 0) return read(part, to);
  // A row is several of the tensor's.
  const std::int64_t each = row_elements / cols;
  if (part.cols == row_elements) {
    return read({part.first_row * each, part.rows * each, 0, cols}, to);
  }
  for (std::int64_t r = 0; r < part.rows; ++r) {
    const std::int64_t row = (part.first_row + r) * each + part.first_col / cols;
    MOESAIC_RETURN_IF_ERROR(
        read({row, part.cols / cols, 0, cols}, to + r * part.cols * element_bytes));
  }
  return {};
}

void transpose_rows(const std::byte* from, std::int64_t element_bytes, std::int64_t pitch,
                    std::int64_t first, std::int64_t step, std::int64_t rows, std::int64_t cols,
                    std::byte* to) {
  switch (element_bytes) {
    case 1:
      return transpose_elements<std::uint8_t>(from, pitch, first, step, rows, cols, to);
    case 2:
      return transpose_elements<std::uint16_t>(from, pitch, first, step, rows, cols, to);
    default:
      return transpose_elements<std::uint32_t>(from, pitch, first, step, rows, cols, to);
  }
}

}  // namespace moesaic::checkpoint
