// Strips of scales: weight_codes.h.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "experts/sm90/codes_int4.h"
#include "experts/sm90/weight_codes.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "quant/super_scales.h"

namespace moesaic::cuda {
namespace {

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

Status check_codes(const OperandQuant& w, std::string_view field, const ConstTensorView& weight) {
  if (w.code_bits == 6) {
    const auto* const codes = weight.as<std::int8_t>();
    const std::int64_t columns = weight.dim(1), count = weight.dim(0) * columns;
    const auto* const wide = std::find_if(codes, codes + count,
                                          [](std::int8_t code) { return code < -32 || code > 31; });
    if (wide == codes + count || MOESAIC_FAULT(cuda_strips_take_any_codes)) return {};
    const std::int64_t at = wide - codes;
    return invalid(
        fmt::format("{}: got code {} at row {}, column {}, need -32 to 31 "
                    "(quant.weight.code_bits)",
                    field, *wide, at / columns, at % columns));
  }
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

// The bits of a scale of row n.
Status put_scale(const OperandQuant& w, const CodeImage& image, std::string_view field,
                 std::int64_t n, float stored, std::size_t to, CodeStrips& strips) {
  if (std::isfinite(stored) && !std::isfinite(stored * strip_unit(w))) {
    return unsupported(fmt::format("{}_scale: got {} for row {}, need at most {} on a GPU", field,
                                   stored, n, std::numeric_limits<float>::max() / strip_unit(w)));
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
  return {};
}

// Scales of has_super_scales. Padding has a scale of zero.
Status split_scales(const OperandQuant& w, const CodeImage& image, std::string_view field,
                    const experts::ProjectionView& view, const WeightShape& shape,
                    const std::int32_t* row_order, CodeStrips& strips) {
  constexpr std::int64_t kChunks = kSuperBlockColumns / 64;
  const std::int64_t chunks = shape.chunks(), part_rows = shape.rows / view.parts;
  const std::int64_t across = view.scale.dim(1), each = kSuperBlockColumns / w.block_k;
  strips.codes.assign(static_cast<std::size_t>(shape.rows * chunks * image.units), 128);
  strips.super.assign(static_cast<std::size_t>(shape.rows * chunks), 0);
  for (std::int64_t n = 0; n < shape.rows; ++n) {
    const std::int64_t row = stored_row(row_order, part_rows, n);
    for (std::int64_t b = 0; b * each < across; ++b) {
      std::array<float, kSuperBlockColumns / 16> values{};
      std::array<std::int8_t, kSuperBlockColumns / 16> codes{};
      const std::int64_t count = std::min(each, across - b * each);
      for (std::int64_t g = 0; g < count; ++g) {
        values[static_cast<std::size_t>(g)] =
            load_as_f32(view.scale.data, view.scale.dtype, row * across + b * each + g);
      }
      std::uint16_t number = 0;
      if (!quant::split_super_scales({values.data(), static_cast<std::size_t>(count)}, w.super_bits,
                                     codes.data(), &number)) {
        return invalid(fmt::format(
            "{}_scale: got numbers at row {}, columns from {} on that are no integers of {} bits "
            "times one number of F16, need such ones (quant.weight.super_bits)",
            field, n, b * kSuperBlockColumns, int{w.super_bits}));
      }
      for (std::int64_t c = b * kChunks; c < std::min(chunks, (b + 1) * kChunks); ++c) {
        strips.super[static_cast<std::size_t>(n * chunks + c)] = number;
      }
      // A group of the weights is a unit of the image.
      for (std::int64_t g = 0; g < count; ++g) {
        strips.codes[static_cast<std::size_t>(n * chunks * image.units + b * each + g)] =
            static_cast<std::uint8_t>(codes[static_cast<std::size_t>(g)] + 128);
      }
    }
  }
  return {};
}

}  // namespace

Status make_strips(const OperandQuant& w, const CodeImage& image, std::string_view field,
                   const experts::ProjectionView& view, const WeightShape& shape,
                   const std::int32_t* row_order, CodeStrips& strips) {
  MOESAIC_RETURN_IF_ERROR(check_codes(w, field, view.weight));
  const std::int64_t units = shape.chunks() * image.units, unit = 64 / image.units;
  const std::int64_t rows = shape.rows, part_rows = rows / view.parts;
  const auto count = static_cast<std::size_t>(rows * units);
  const bool super = has_super_scales(w);
  strips.upper.assign(super ? 0 : count, 0);
  strips.lower.assign(!super && image.low_at != 0 ? count : 0, 0);
  if (super) MOESAIC_RETURN_IF_ERROR(split_scales(w, image, field, view, shape, row_order, strips));
  strips.zero.assign(image.zero_at != 0 ? count : 0, 0);
  strips.offset.assign(image.offset_at != 0 ? count : 0, 0);
  const ConstTensorView& scale = view.scale;
  const bool grid = scale.rank() == 2, channel = w.granularity == ScaleGranularity::kChannel;
  const std::int32_t zero_code = code_of_zero(w);
  const std::int32_t largest = image_bits(w) == 4 ? kLargestInt4Zero : 255;
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
      if (!super) MOESAIC_RETURN_IF_ERROR(put_scale(w, image, field, n, stored, to, strips));
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
