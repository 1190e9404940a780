#include "quant/bnb.h"

#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"

namespace moesaic::quant {
namespace {

// Magnitudes by code; bit 3 is the sign. Not in ascending order: the bits of a tiny float (1 sign,
// 2 exponent, 1 mantissa) as bitsandbytes assigns them.
constexpr std::array<float, 16> kFp4Values = {
    0.0F,  0.005208333333F,  0.66666667F,  1.0F,  0.33333333F,  0.5F,  0.16666667F,  0.25F,
    -0.0F, -0.005208333333F, -0.66666667F, -1.0F, -0.33333333F, -0.5F, -0.16666667F, -0.25F,
};
constexpr std::array<std::uint8_t, 8> kFp4Ascending = {0, 1, 6, 7, 4, 5, 2, 3};

std::uint8_t fp4_from_f32(float x) {
  const double magnitude = std::abs(static_cast<double>(x));
  std::uint8_t code = 0;
  for (std::size_t i = 0; i + 1 < kFp4Ascending.size(); ++i) {
    const double midpoint = 0.5 * (static_cast<double>(kFp4Values[kFp4Ascending[i]]) +
                                   static_cast<double>(kFp4Values[kFp4Ascending[i + 1]]));
    if (magnitude > midpoint) code = kFp4Ascending[i + 1];
  }
  return static_cast<std::uint8_t>(code | (std::signbit(x) && !std::isnan(x) ? 8U : 0U));
}

std::int64_t blocks_of(std::int64_t count, std::int64_t block) {
  return count / block + (count % block != 0 ? 1 : 0);
}

// Bits that element i's nibble is shifted by: the first of a byte is the high one.
int shift_of(std::int64_t i) {
  return ((i & 1) == 0) != MOESAIC_FAULT(quant_bnb_nibble_order) ? 4 : 0;
}

}  // namespace

std::span<const float, 16> bnb_values(CodeTable table) {
  return table == CodeTable::kNf4 ? std::span<const float, 16>(kNf4Values)
                                  : std::span<const float, 16>(kFp4Values);
}

std::uint8_t bnb_encode(CodeTable table, float x) {
  if (table == CodeTable::kFp4) return fp4_from_f32(x);
  return std::isnan(x) ? std::uint8_t{7} : nf4_from_f32(x);
}

Status quantize_bnb4(ConstTensorView x, CodeTable table, std::int64_t block_size, TensorView packed,
                     TensorView absmax) {
  if (block_size < kBnbMinBlockSize || block_size > kBnbMaxBlockSize ||
      !std::has_single_bit(static_cast<std::uint64_t>(block_size))) {
    return Status(StatusCode::kInvalidArgument, "block_size: got " + std::to_string(block_size) +
                                                    ", need a power of two, 32 .. 4096");
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, x.shape.num_elements());
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"x", x, kPlainFloats, x.shape},
      {"packed", packed, accept(DType::kU8), {blocks_of(count, 2)}, true},
      {"absmax", absmax, accept(DType::kF32), {blocks_of(count, block_size)}, true},
  }));
  MOESAIC_RETURN_IF_ERROR(expect_finite("x", x));
  for (std::int64_t first = 0; first < count; first += block_size) {
    const std::int64_t size = std::min(block_size, count - first);
    const float amax = max_abs(x, first, size);
    absmax.as<float>()[first / block_size] = amax;
    for (std::int64_t i = first; i < first + size; ++i) {
      const float value = load_as_f32(x.data, x.dtype, i);
      // A block of zeros has no units to measure in.
      const unsigned code = bnb_encode(table, amax > 0.0F ? value / amax : 0.0F);
      std::uint8_t& byte = packed.as<std::uint8_t>()[i / 2];
      if (i % 2 == 0) byte = 0;
      byte = static_cast<std::uint8_t>(byte | code << shift_of(i));
    }
  }
  return {};
}

Status expand_nested_absmax(ConstTensorView codes, ConstTensorView map,
                            ConstTensorView nested_absmax, std::int64_t nested_block, float offset,
                            TensorView absmax) {
  MOESAIC_RETURN_IF_ERROR(expect_positive("nested_block", nested_block));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, codes.shape.num_elements());
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"codes", codes, accept(DType::kU8), {count}},
      {"map", map, accept(DType::kF32), {256}},
      {"nested_absmax", nested_absmax, accept(DType::kF32), {blocks_of(count, nested_block)}},
      {"absmax", absmax, accept(DType::kF32), {count}, true},
  }));
  for (std::int64_t i = 0; i < count; ++i) {
    const float product =
        map.as<float>()[codes.as<std::uint8_t>()[i]] * nested_absmax.as<float>()[i / nested_block];
    absmax.as<float>()[i] = MOESAIC_FAULT(quant_bnb_no_offset) ? product : product + offset;
  }
  return {};
}

Status swap_nibbles(ConstTensorView in, TensorView out) {
  MOESAIC_RETURN_IF_ERROR(check_arguments({{"in", in, accept(DType::kU8), in.shape}}));
  MOESAIC_RETURN_IF_ERROR(check_arguments({{"out", out, accept(DType::kU8), in.shape}}));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, in.shape.num_elements());
  for (std::int64_t i = 0; i < count; ++i) {
    out.as<std::uint8_t>()[i] = std::rotl(in.as<std::uint8_t>()[i], 4);
  }
  return {};
}

}  // namespace moesaic::quant
