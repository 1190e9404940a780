#include "quant/dequantize_weight.h"

#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/arguments.h"
#include "quant/code_values.h"

namespace moesaic::quant {
namespace {

constexpr DTypeMask kIntegers = accept(DType::kI8, DType::kU8, DType::kI4, DType::kU4);
constexpr DTypeMask kStoredScales = kPlainFloats | accept(DType::kF8E8M0, DType::kF8E4M3);

// Where the scale of element (n, k) is: index = row(n) * columns + k / group.
struct ScaleGrid {
  Shape shape;
  std::int64_t columns = 1;
  std::int64_t group = 1;  // columns of the matrix per scale
  std::int64_t block_n = 0, rows_per_part = 0, blocks_per_part = 0;
  bool whole = false;  // one scale for everything

  std::int64_t index(std::int64_t n, std::int64_t k) const {
    if (whole) return 0;
    std::int64_t row = n;
    if (block_n > 0) {
      row = n / rows_per_part * blocks_per_part + n % rows_per_part / block_n;
    }
    return row * columns + k / group;
  }
};

Result<ScaleGrid> grid_of(const OperandQuant& quant, std::int64_t rows, std::int64_t cols,
                          std::int64_t rows_per_part) {
  ScaleGrid grid;
  grid.group = std::max<std::int64_t>(cols, 1);
  switch (quant.granularity) {
    case ScaleGranularity::kTensor:
      grid.whole = true;
      grid.shape = {1};
      return grid;
    case ScaleGranularity::kChannel:
      grid.shape = {rows};
      return grid;
    case ScaleGranularity::kGroup:
      MOESAIC_RETURN_IF_ERROR(expect_positive("quant.block_k", quant.block_k));
      grid.group = quant.block_k;
      grid.columns = cols / grid.group + (cols % grid.group != 0 ? 1 : 0);
      grid.shape = {rows, grid.columns};
      return grid;
    case ScaleGranularity::kBlock: {
      MOESAIC_RETURN_IF_ERROR(expect_positive("quant.block_n", quant.block_n));
      MOESAIC_RETURN_IF_ERROR(expect_positive("quant.block_k", quant.block_k));
      MOESAIC_RETURN_IF_ERROR(expect_positive("rows_per_part", rows_per_part));
      grid.group = quant.block_k;
      grid.columns = cols / grid.group + (cols % grid.group != 0 ? 1 : 0);
      grid.block_n = quant.block_n;
      grid.rows_per_part = rows_per_part;
      grid.blocks_per_part =
          rows_per_part / grid.block_n + (rows_per_part % grid.block_n != 0 ? 1 : 0);
      grid.shape = {rows / rows_per_part * grid.blocks_per_part, grid.columns};
      return grid;
    }
    case ScaleGranularity::kNone:
      return grid;
    case ScaleGranularity::kToken:
      break;
  }
  return Status(StatusCode::kUnsupported, "quant.granularity: got per token, need one of weights");
}

// The number a code stands for before scales; `values` are those of 4-bit formats.
float code_value(const ConstTensorView& weight, const CodeValues& values, std::int64_t at) {
  switch (weight.dtype) {
    case DType::kI8:
      return static_cast<float>(weight.as<std::int8_t>()[at]);
    case DType::kU8:
      return static_cast<float>(weight.as<std::uint8_t>()[at]);
    case DType::kF4E2M1:
    case DType::kI4:
    case DType::kU4:
      return values[nibble_at(weight.as<std::uint8_t>(), at)];
    default:
      return load_as_f32(weight.data, weight.dtype, at);
  }
}

Status check_optional(std::string_view field, bool used, const ConstTensorView& view,
                      DTypeMask dtypes, const Shape& shape) {
  if (!used) return {};
  return check_arguments({{field, view, dtypes, shape}});
}

}  // namespace

Status dequantize_weight(const OperandQuant& quant, const StoredMatrix& stored,
                         std::int64_t rows_per_part, TensorView out) {
  MOESAIC_RETURN_IF_ERROR(expect_matrix("weight", stored.weight));
  const std::int64_t rows = stored.weight.dim(0);
  const std::int64_t cols = stored.weight.dim(1);
  const DTypeMask weights =
      kIntegers | (is_loadable_float(quant.dtype) ? accept(quant.dtype) : DTypeMask{0});
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"weight", stored.weight, weights & accept(quant.dtype), stored.weight.shape},
      {"out", out, accept(DType::kF32), stored.weight.shape, true},
  }));
  MOESAIC_ASSIGN_OR_RETURN(const ScaleGrid grid, grid_of(quant, rows, cols, rows_per_part));
  const bool scaled = quant.granularity != ScaleGranularity::kNone;
  const bool has_zero = quant.zero_point == ZeroPoint::kInteger;
  const bool has_min = quant.zero_point == ZeroPoint::kMin;
  const bool per_tensor = quant.outer_scale == OuterScale::kTensor;
  const bool per_channel = quant.outer_scale == OuterScale::kChannel;
  MOESAIC_RETURN_IF_ERROR(check_optional("scale", scaled, stored.scale, kStoredScales, grid.shape));
  MOESAIC_RETURN_IF_ERROR(
      check_optional("zero", has_zero, stored.zero, accept(DType::kU8, DType::kI8), grid.shape));
  MOESAIC_RETURN_IF_ERROR(
      check_optional("min", has_min, stored.min, accept(DType::kF32), grid.shape));
  MOESAIC_RETURN_IF_ERROR(
      check_optional("global_scale", per_tensor, stored.global_scale, accept(DType::kF32), {1}));
  MOESAIC_RETURN_IF_ERROR(check_optional("channel_scale", per_channel, stored.channel_scale,
                                         accept(DType::kF32), {rows}));
  MOESAIC_RETURN_IF_ERROR(
      check_optional("perm", quant.act_order, stored.perm, accept(DType::kI32), {cols}));
  // W4A8: the product of code and scale is itself an e4m3 number.
  const bool rounds_product =
      quant.dtype == DType::kI4 && quant.scale_format == ScaleFormat::kE4M3 && per_channel;

  const CodeValues values = code_values(quant);
  for (std::int64_t n = 0; n < rows && cols > 0; ++n) {
    float outer = per_tensor ? *stored.global_scale.as<float>() : 1.0F;
    if (per_channel) outer = stored.channel_scale.as<float>()[n];
    for (std::int64_t k = 0; k < cols; ++k) {
      const std::int64_t at = grid.index(n, k);
      float value = code_value(stored.weight, values, n * cols + k);
      if (has_zero) {
        value -= stored.zero.dtype == DType::kI8
                     ? static_cast<float>(stored.zero.as<std::int8_t>()[at])
                     : static_cast<float>(stored.zero.as<std::uint8_t>()[at]);
      }
      if (rounds_product) {
        value = int4_fp8_value(static_cast<int>(value),
                               f32_from_e4m3(stored.scale.as<std::uint8_t>()[at]));
      } else if (scaled) {
        value *= load_as_f32(stored.scale.data, stored.scale.dtype, at);
      }
      if (has_min) value -= stored.min.as<float>()[at];
      if (per_tensor || per_channel) value *= outer;
      std::int64_t to = k;
      if (quant.act_order && !MOESAIC_FAULT(quant_dequantize_ignores_perm)) {
        to = stored.perm.as<std::int32_t>()[k];
        if (to < 0 || to >= cols) {
          return Status(StatusCode::kInvalidArgument, "perm[" + std::to_string(k) + "]: got " +
                                                          std::to_string(to) + ", need 0 .. " +
                                                          std::to_string(cols - 1));
        }
      }
      out.as<float>()[n * cols + to] = value;
    }
  }
  return {};
}

}  // namespace moesaic::quant
