#include "experts/sm90/weight_codes.h"

#include <fmt/format.h>

#include <array>

#include "core/fault.h"
#include "core/refusal.h"
#include "experts/sm90/codes_integer.h"
#include "experts/sm90/codes_table.h"
#include "experts/sm90/format_parts.h"
#include "numerics/float_codec.h"
#include "quant/block_scales.h"
#include "quant/code_values.h"

namespace moesaic::cuda {
namespace {

bool is_four_bits(DType dtype) { return dtype == DType::kI4 || dtype == DType::kU4; }
bool is_signed(DType dtype) { return dtype == DType::kI4 || dtype == DType::kI8; }

// Integers that are handed over in a byte each.
bool has_bytes(const OperandQuant& w) {
  return (w.dtype == DType::kI8 || w.dtype == DType::kU8) && w.scale_format == ScaleFormat::kF32;
}

// Elements of K that have one scale in the image.
std::int64_t unit_columns(const OperandQuant& w) {
  if (w.block_k == 0 || w.block_k % 64 == 0) return 64;
  return w.block_k % 32 == 0 ? 32 : 16;
}

}  // namespace

float strip_unit(const OperandQuant& w) {
  return has_bytes(w) || has_int4_codes(w) ? kIntegerUnit : 1.0F;
}
bool has_minima(const OperandQuant& w) { return w.zero_point == ZeroPoint::kMin; }
bool has_scales_of_sums(const OperandQuant& w) { return unit_columns(w) == 64 && !has_minima(w); }
int image_bits(const OperandQuant& w) {
  if (is_four_bits(w.dtype)) {
    const bool narrow = unit_columns(w) == 16 && w.table == CodeTable::kNone;
    return narrow && !has_super_scales(w) ? 6 : 4;
  }
  return w.code_bits == 6 && !has_scales_of_sums(w) ? 6 : 8;
}
std::int32_t code_of_zero(const OperandQuant& w) {
  if (!is_signed(w.dtype)) return 0;
  return is_four_bits(w.dtype) ? 8 : image_bits(w) == 6 ? 32 : 128;
}
bool has_rests(const OperandQuant& w) {
  return image_bits(w) == 4 && !has_scales_of_sums(w) && !has_super_scales(w);
}
bool has_super_scales(const OperandQuant& w) {
  if (w.super_bits == 0 || w.table != CodeTable::kNone) return false;
  const bool six = w.code_bits == 6, quarters = unit_columns(w) == 16;
  if (!six && !is_four_bits(w.dtype)) return false;
  return six && has_minima(w) ? unit_columns(w) == 32 : quarters;
}
bool has_table_codes(const OperandQuant& w) { return w.table != CodeTable::kNone; }
bool has_int4_codes(const OperandQuant& w) {
  return is_four_bits(w.dtype) && !has_table_codes(w) && w.scale_format == ScaleFormat::kF32;
}
bool has_int6_codes(const OperandQuant& w) {
  return (has_bytes(w) || has_int4_codes(w)) && image_bits(w) == 6;
}
bool has_int8_codes(const OperandQuant& w) { return has_bytes(w) && image_bits(w) == 8; }
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
  CodeImage image;
  image.units = static_cast<std::int32_t>(64 / unit_columns(w));
  const bool zeros = w.zero_point != ZeroPoint::kNone;
  if (w.table != CodeTable::kNone) {
    std::array<std::uint16_t, 16> entries{};
    const quant::CodeValues values = quant::code_values_bf16(w);
    for (std::size_t c = 0; c < entries.size(); ++c) entries[c] = bf16_from_f32(values[c]);
    const WordsOfTable words = words_of_table(entries);
    for (std::size_t i = 0; i < words.size(); ++i) image.table[i] = words[i];
  } else if (strip_unit(w) != 1.0F) {
    const auto middle = static_cast<float>(code_of_zero(w));
    image.addend = bf16_from_f32(-middle / kIntegerUnit) * 0x00010001U;
  }
  // Codes, then per unit 4 bytes for each pair of rows, 2 or 4 for what these leave of the scales, 2 for
  // zero points, and 4 for offsets. Super scales: 2 bytes per unit, then 4 for the F16 numbers.
  const std::int32_t pairs = kSlabRows / 2 * image.units;
  const bool super = has_super_scales(w);
  image.slab_bytes = kSlabRows * 8 * image_bits(w) + (super ? 2 : 4) * pairs;
  if (super) {
    image.low_at = image.slab_bytes;
    image.slab_bytes += 2 * kSlabRows;
  }
  const auto take = [&](std::int32_t bytes) {
    image.slab_bytes += bytes * pairs;
    return bytes == 0 ? 0 : image.slab_bytes - bytes * pairs;
  };
  if (!super) image.low_at = take(exact_scales ? 0 : has_rests(w) ? 4 : 2);
  image.zero_at = take(zeros ? 2 : 0);
  image.offset_at = take(has_minima(w) ? 4 : 0);
  return image;
}

}  // namespace moesaic::cuda
