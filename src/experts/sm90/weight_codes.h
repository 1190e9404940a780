// Weights that formats/int4_bf16.h, table_bf16.h, int8_bf16.h and fp8_bf16.h multiply: which stored
// formats these are, how the image is made of them, and the strip of scales behind the codes of a
// slab. Host code without CUDA.
//
// A row's K is cut into units of 16, 32 or 64 elements that have one scale and one zero point. A
// scale times strip_unit is rounded to 16 significant bits (those of bf16 and F16 have fewer): `upper`
// is its first 16 bits as F32, `lower` the next 8, or (has_rests) what `upper` leaves of it, as bf16: at
// most 8 significant bits.
//
// A scale of has_super_scales is that integer plus 128 in a byte.
//
// A minimum m beside scale s is a zero point z and an offset: q s - m = (q - z) s + (z s - m) with the z
// that is next to m / s, so that the offset, which is rounded to bf16, is at most half a scale, or the
// weight itself is large (m / s far outside of the codes).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "experts/reference/matrix.h"
#include "experts/sm90/grouped_gemm.h"
#include "experts/sm90/repack.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

// Of each format: which weights are its own, and kUnsupported for scales that it has no place for.
bool has_int4_codes(const OperandQuant& weight);
bool has_table_codes(const OperandQuant& weight);
bool has_int6_codes(const OperandQuant& weight);
bool has_int8_codes(const OperandQuant& weight);
bool has_fp8_codes(const OperandQuant& weight);
// Of these, those that have one scale of a row in each chunk, and no minimum: sums are multiplied by it.
bool has_scales_of_sums(const OperandQuant& weight);
bool has_rests(const OperandQuant& weight);
bool has_minima(const OperandQuant& weight);
// Bits of a code in the image: 4, 6 (in weights that are rounded to bf16: OperandQuant::code_bits, and
// 4-bit integers in groups of 16 columns) or 8.
int image_bits(const OperandQuant& weight);
// The code, as the image has it, of the integer 0.
std::int32_t code_of_zero(const OperandQuant& weight);
// Scales are integers times one F16 number of a row and chunk (OperandQuant::super_bits), where a format
// has them so.
bool has_super_scales(const OperandQuant& weight);
Status check_strip_scales(const OperandQuant& weight);
// What the image's scales are multiplied by: the decoder makes so much less of a code.
float strip_unit(const OperandQuant& weight);

// Neighbouring chunks, 1 or 2, that have one scale and zero point in each row: their products are
// summed up before they are multiplied by it. A property of the weights, so that all builds sum alike.
std::uint8_t chunks_of_sums(const OperandQuant& weight);

// What is known of the image before the weights are. `exact_scales`: all are bf16 numbers.
CodeImage code_image(const OperandQuant& weight, bool exact_scales);

// Scales, zero points and offsets of one matrix, [rows][chunks * units]; each is empty where the image
// has none.
struct CodeStrips {
  std::vector<std::uint16_t> upper, lower;
  std::vector<std::uint8_t> codes;   // of has_super_scales
  std::vector<std::uint16_t> super;  // the F16 numbers that these are multiplied by, [rows][chunks]
  std::vector<std::uint8_t> zero;
  std::vector<std::uint16_t> offset;
};
// Row n of the image is row stored_row of the matrix: each of its parts in the order of `order`, if
// any.
inline std::int64_t stored_row(const std::int32_t* order, std::int64_t part_rows, std::int64_t n) {
  return order == nullptr ? n : n / part_rows * part_rows + order[n % part_rows];
}
// kUnsupported: zero points or scales that the decoder has no room for; weights that are NaN.
// kInvalidArgument: codes that need more bits than OperandQuant::code_bits, scales that are not of
// OperandQuant::super_bits.
Status make_strips(const OperandQuant& weight, const CodeImage& image, std::string_view field,
                   const experts::ProjectionView& view, const WeightShape& shape,
                   const std::int32_t* row_order, CodeStrips& strips);

}  // namespace moesaic::cuda
