#include "experts/sm90/weight_codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "experts/sm90/codes_bytes.h"
#include "experts/sm90/codes_int4.h"
#include "experts/sm90/codes_integer.h"
#include "experts/sm90/codes_table.h"
#include "experts/sm90/format_parts.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "quant/block_scales.h"
#include "quant/code_values.h"

namespace moesaic::cuda {
namespace {

bool is_four_bits(DType dtype) { return dtype == DType::kI4 || dtype == DType::kU4; }
bool is_signed(DType dtype) { return dtype == DType::kI4 || dtype == DType::kI8; }

// Elements of K that have one scale in the image.
std::int64_t unit_columns(const OperandQuant& w) {
  if (w.block_k == 0 || w.block_k % 64 == 0) return 64;
  return w.block_k % 32 == 0 ? 32 : 16;
}

// Bits of an F32 number rounded to 16 significant bits, ties to even.
std::uint32_t round_to_24_bits(float v) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  if (MOESAIC_FAULT(cuda_strips_cut_scales_off)) return bits & 0xFFFF0000U;
  return (bits + 0x7FU + (bits >> 8 & 1)) & 0xFFFFFF00U;
}

// What the upper half leaves of a scale.
std::uint16_t lower_of(std::uint32_t bits, bool as_bf16) {
  if (!as_bf16) return static_cast<std::uint16_t>(bits >> 8 & 0xFF);
  const float rest = std::bit_cast<float>(bits) - std::bit_cast<float>(bits & 0xFFFF0000U);
  return std::isfinite(rest) ? bf16_from_f32(rest) : std::uint16_t{0};
}

// The zero point of a minimum, and what it leaves. zero_code: the code of 0, largest: a zero point.
struct SplitMinimum {
  std::int32_t zero;
  std::uint16_t offset;
};
SplitMinimum split_minimum(double scale, double minimum, std::int32_t zero_code,
                           std::int32_t largest) {
  const double at = zero_code + minimum / scale;  // not finite: a scale of zero
  const double zero = std::isfinite(at) ? std::clamp(std::nearbyint(at), 0.0, 1.0 * largest) : 0.0;
  const double offset = scale * (zero - zero_code) - minimum;
  return {static_cast<std::int32_t>(zero), bf16_from_f32(static_cast<float>(offset))};
}

Status check_codes(std::string_view field, const ConstTensorView& weight) {
  if (weight.dtype != DType::kF8E4M3) return {};
  const auto* const codes = weight.as<std::uint8_t>();
  const std::int64_t columns = weight.dim(1);
  for (std::int64_t n = 0; n < weight.dim(0); ++n) {
    unsigned nan = 0;
    for (std::int64_t k = 0; k < columns; ++k) nan |= (codes[n * columns + k] & 0x7F) == 0x7F;
    if (nan != 0) {
      return unsupported(fmt::format("{}: got NaN in row {}, need numbers on a GPU", field, n));
    }
  }
  return {};
}

}  // namespace

float strip_unit(const OperandQuant& w) {
  return has_int8_codes(w) || has_int4_codes(w) ? kIntegerUnit : 1.0F;
}
bool has_minima(const OperandQuant& w) { return w.zero_point == ZeroPoint::kMin; }
bool has_scales_of_sums(const OperandQuant& w) { return unit_columns(w) == 64 && !has_minima(w); }
bool has_nibbles(const OperandQuant& w) {
  return is_four_bits(w.dtype) && (w.block_k % 32 == 0 || w.table != CodeTable::kNone);
}
bool has_rests(const OperandQuant& w) { return has_nibbles(w) && !has_scales_of_sums(w); }
bool has_int4_codes(const OperandQuant& w) {
  return has_nibbles(w) && w.table == CodeTable::kNone && w.scale_format == ScaleFormat::kF32;
}
bool has_table_codes(const OperandQuant& w) { return w.table != CodeTable::kNone; }
bool has_int8_codes(const OperandQuant& w) {
  const bool integers = is_four_bits(w.dtype) || w.dtype == DType::kI8 || w.dtype == DType::kU8;
  return integers && !has_nibbles(w) && w.scale_format == ScaleFormat::kF32;
}
bool has_fp8_codes(const OperandQuant& w) {
  return w.dtype == DType::kF8E4M3 && w.scale_format == ScaleFormat::kF32;
}

Status check_strip_scales(const OperandQuant& w) {
  const bool whole_blocks = w.block_n == quant::kFp8BlockSize && w.block_k == quant::kFp8BlockSize;
  if (w.granularity == ScaleGranularity::kBlock && !whole_blocks) {
    return unsupported(fmt::format("weight: got blocks of {}x{}, need {}x{}", w.block_n, w.block_k,
                                   quant::kFp8BlockSize, quant::kFp8BlockSize));
  }
  const std::int64_t smallest = has_table_codes(w) ? 32 : has_fp8_codes(w) ? 64 : 16;
  if (w.block_k % smallest == 0) return {};
  return unsupported(fmt::format("block_k: got {}, need a multiple of {}", w.block_k, smallest));
}

std::uint8_t chunks_of_sums(const OperandQuant& w) {
  if (MOESAIC_FAULT(cuda_sums_of_two_groups)) return 2;
  return w.block_k % 128 == 0 ? 2 : 1;
}

CodeImage code_image(const OperandQuant& w, bool exact_scales) {
  const bool four = is_four_bits(w.dtype);
  CodeImage image;
  image.units = static_cast<std::int32_t>(64 / unit_columns(w));
  const bool zeros = w.zero_point != ZeroPoint::kNone;
  if (w.table != CodeTable::kNone) {
    std::array<std::uint16_t, 16> entries{};
    const quant::CodeValues values = quant::code_values_bf16(w);
    for (std::size_t c = 0; c < entries.size(); ++c) entries[c] = bf16_from_f32(values[c]);
    const BytesOfTable bytes = bytes_of_table(entries);
    for (std::size_t i = 0; i < bytes.size(); ++i) image.table[i] = bytes[i];
  } else if (strip_unit(w) != 1.0F) {
    const float middle = !is_signed(w.dtype) ? 0.0F : four ? 8.0F : 128.0F;
    image.addend = bf16_from_f32(-middle / kIntegerUnit) * 0x00010001U;
  }
  // Codes, then per unit 4 bytes for each pair of rows, 2 or 4 for what these leave of the scales, 2 for
  // zero points, and 4 for offsets.
  const std::int32_t pairs = kSlabRows / 2 * image.units;
  image.slab_bytes = kSlabRows * (has_nibbles(w) ? 32 : 64) + 4 * pairs;
  const auto take = [&](std::int32_t bytes) {
    image.slab_bytes += bytes * pairs;
    return bytes == 0 ? 0 : image.slab_bytes - bytes * pairs;
  };
  image.low_at = take(exact_scales ? 0 : has_rests(w) ? 4 : 2);
  image.zero_at = take(zeros ? 2 : 0);
  image.offset_at = take(has_minima(w) ? 4 : 0);
  return image;
}

Status make_strips(const OperandQuant& w, const CodeImage& image, std::string_view field,
                   const experts::ProjectionView& view, const WeightShape& shape,
                   const std::int32_t* row_order, CodeStrips& strips) {
  MOESAIC_RETURN_IF_ERROR(check_codes(field, view.weight));
  const std::int64_t units = shape.chunks() * image.units, unit = 64 / image.units;
  const std::int64_t rows = shape.rows, part_rows = rows / view.parts;
  const auto count = static_cast<std::size_t>(rows * units);
  strips.upper.assign(count, 0);
  strips.lower.assign(image.low_at != 0 ? count : 0, 0);
  strips.zero.assign(image.zero_at != 0 ? count : 0, 0);
  strips.offset.assign(image.offset_at != 0 ? count : 0, 0);
  const ConstTensorView& scale = view.scale;
  const bool grid = scale.rank() == 2, channel = w.granularity == ScaleGranularity::kChannel;
  const std::int32_t zero_code = !is_signed(w.dtype) ? 0 : is_four_bits(w.dtype) ? 8 : 128;
  const std::int32_t largest = has_nibbles(w) ? kLargestInt4Zero : 255;
  for (std::int64_t n = 0; n < rows; ++n) {
    const std::int64_t row = stored_row(row_order, part_rows, n);
    const std::int64_t block =
        grid ? row / part_rows * ceil_div(part_rows, w.block_n) + row % part_rows / w.block_n : 0;
    for (std::int64_t u = 0; u < units && u * unit < shape.columns; ++u) {
      std::int64_t at = grid ? block * scale.dim(1) + u * unit / w.block_k : channel ? row : 0;
      const auto to = static_cast<std::size_t>(n * units + u);
      if (MOESAIC_FAULT(cuda_strips_have_the_scale_of_the_first_group))
        at = grid ? block * scale.dim(1) : at;
      const float stored = load_as_f32(scale.data, scale.dtype, at);
      if (std::isfinite(stored) && !std::isfinite(stored * strip_unit(w))) {
        return unsupported(fmt::format("{}_scale: got {} for row {}, need at most {} on a GPU",
                                       field, stored, n,
                                       std::numeric_limits<float>::max() / strip_unit(w)));
      }
      if (image.low_at == 0 && (std::bit_cast<std::uint32_t>(stored) & 0xFFFF) != 0) {
        const bool promised = w.scale_dtype == DType::kBF16;
        return Status(
            promised ? StatusCode::kInvalidArgument : StatusCode::kUnsupported,
            fmt::format("{}_scale: got {} for row {}, need a number of BF16 ({})", field, stored, n,
                        promised ? "quant.weight.scale_dtype" : "as in the first expert"));
      }
      const std::uint32_t bits = round_to_24_bits(stored * strip_unit(w));
      strips.upper[to] = static_cast<std::uint16_t>(bits >> 16);
      if (image.low_at != 0) strips.lower[to] = lower_of(bits, has_rests(w));
      if (image.zero_at == 0) continue;
      if (has_minima(w)) {
        const float minimum = view.min.as<float>()[at];
        SplitMinimum split = split_minimum(static_cast<double>(stored),
                                           static_cast<double>(minimum), zero_code, largest);
        if (!std::isfinite(f32_from_bf16(split.offset))) {
          return unsupported(
              fmt::format("{}_min: got {} for row {}, need numbers that BF16 has "
                          "on a GPU",
                          field, minimum, n));
        }
        if (MOESAIC_FAULT(cuda_strips_lose_the_minimum)) split.offset = 0;
        strips.zero[to] = static_cast<std::uint8_t>(split.zero);
        strips.offset[to] = split.offset;
        continue;
      }
      std::int32_t zero = zero_code;
      if (view.zero.present()) {
        zero += view.zero.dtype == DType::kI8 ? view.zero.as<std::int8_t>()[at]
                                              : view.zero.as<std::uint8_t>()[at];
      }
      if (zero < 0 || zero > largest) {
        return unsupported(fmt::format("{}_zero: got {} for row {}, need {} .. {} on a GPU", field,
                                       zero - zero_code, n, -zero_code, largest - zero_code));
      }
      strips.zero[to] = static_cast<std::uint8_t>(zero);
    }
  }
  return {};
}

}  // namespace moesaic::cuda
