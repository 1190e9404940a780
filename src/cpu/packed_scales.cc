// Scales and offsets of grouped formats in the order in which the kernels read them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/fault.h"
#include "cpu/packed_weights.h"
#include "numerics/codec.h"
#include "numerics/element.h"
#include "quant/code_values.h"

namespace moesaic::cpu {
namespace {

// Calls use(row, index of the scale, or -1 for padding) for every column of every group of every
// panel, in the order of the packed form.
template <class Use>
void for_each_scale(const PackedShape& shape, std::int64_t fold, ScaleTile tile, Use use) {
  const std::int64_t across = ceil_div(shape.k, tile.columns);
  const std::int64_t half_rows = shape.order == RowOrder::kGateUp ? shape.rows / 2 : shape.rows;
  const std::int64_t half_tiles = ceil_div(half_rows, tile.rows);
  const std::int64_t groups = shape.padded_k() / fold;
  for (std::int64_t p = 0; p < shape.num_panels(); ++p) {
    for (std::int64_t g = 0; g < groups; ++g) {
      // Groups beyond K repeat the last scale: their weights are 0.
      const std::int64_t at = std::min(g * fold / tile.columns, across - 1);
      for (int c = 0; c < kPanelColumns; ++c) {
        std::int64_t row = shape.source_row(p, c);
        if (MOESAIC_FAULT(cpu_exponent_of_first_column) && row >= 0) row = shape.source_row(p, 0);
        if (row >= 0 && tile.rows > 1) {
          row = MOESAIC_FAULT(cpu_any_block_rows_across_halves)
                    ? row / tile.rows
                    : row / half_rows * half_tiles + row % half_rows / tile.rows;
        }
        use(row < 0 ? -1 : row * across + at);
      }
    }
  }
}

}  // namespace

CodeTable4 make_code_table(const std::array<float, 16>& values) {
  CodeTable4 t{};
  for (std::size_t c = 0; c < values.size(); ++c) {
    const std::uint16_t bits = bf16_from_f32(values[c]);
    t.values[c] = t.values[c + 16] = bits;
    t.low[c] = static_cast<std::uint8_t>(bits & 0xFFU);
    t.high[c] = static_cast<std::uint8_t>(bits >> 8);
  }
  return t;
}

const Int4Products& int4_products() {
  static const Int4Products table = [] {
    Int4Products t{};
    for (int scale = 0; scale < 256; ++scale) {
      for (int code = 0; code < 16; ++code) {
        const int value = i4_from_nibble(static_cast<std::uint8_t>(code));
        t.of[scale][code] = bf16_from_f32(
            quant::int4_fp8_value(value, f32_from_e4m3(static_cast<std::uint8_t>(scale))));
      }
    }
    return t;
  }();
  return table;
}

std::int64_t pack_group_scales(const PackedShape& shape, std::int64_t fold, ScaleTile tile,
                               GroupScaleForm form, const ConstTensorView& scale, std::byte* dst) {
  const auto one = static_cast<std::byte>(form == GroupScaleForm::kE8M0 ? 127 : 0x38);
  const DType dtype = form == GroupScaleForm::kF16    ? DType::kF16
                      : form == GroupScaleForm::kBF16 ? DType::kBF16
                                                      : DType::kF32;
  std::int64_t bad = -1;
  for_each_scale(shape, fold, tile, [&](std::int64_t index) {
    if (bytes_of(form) == 1) {
      *dst++ = index < 0 ? one : scale.data[index];
      return;
    }
    const float value = index < 0 ? 1.0F : load_as_f32(scale.data, scale.dtype, index);
    store_from_f32(dst, dtype, 0, value);
    const float held = load_as_f32(dst, dtype, 0);
    const bool same = held == value || (std::isnan(held) && std::isnan(value));
    if (!same && bad < 0 && !MOESAIC_FAULT(cpu_scales_rounded_to_half)) bad = index;
    dst += bytes_of(form);
  });
  return bad;
}

void pack_group_offsets(const PackedShape& shape, std::int64_t fold, std::int64_t columns,
                        const ConstTensorView& scale, const ConstTensorView& zero,
                        const ConstTensorView& min, int bias, float* dst) {
  for_each_scale(shape, fold, {1, columns}, [&](std::int64_t index) {
    if (index < 0) {
      *dst++ = 0.0F;
      return;
    }
    const float s = load_as_f32(scale.data, scale.dtype, index);
    int from = -bias;
    if (zero.present()) {
      from +=
          zero.dtype == DType::kI8 ? zero.as<std::int8_t>()[index] : zero.as<std::uint8_t>()[index];
    }
    if (MOESAIC_FAULT(cpu_zero_point_of_the_other_sign)) from = -from;
    const float offset = s * static_cast<float>(from);
    *dst++ = min.present() ? min.as<float>()[index] + offset : offset;
  });
}

}  // namespace moesaic::cpu
