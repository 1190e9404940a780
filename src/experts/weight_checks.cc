// Checks of one expert's tensors against the problem: presence, shapes, dtypes, layout, and the
// values that would silently poison every product.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "experts/expert_fields.h"
#include "experts/problem_checks.h"
#include "experts/reference/matrix.h"
#include "numerics/element.h"

namespace moesaic::experts {
namespace {

// Absent although the scheme needs it, or present although it does not; sets *wanted.
Status check_presence(const std::string& field, const ConstTensorView& t, bool wanted,
                      const OperandQuant& w, const Shape& need, std::string_view need_dtype) {
  if (wanted && !t.present()) {
    return invalid(fmt::format("{}: got none, {} weights need {} {}", field, dtype_name(w.dtype),
                               need.to_string(), need_dtype));
  }
  if (!wanted && t.present()) {
    return invalid(fmt::format("{}: got {}, but {} weights of this scheme have none", field,
                               t.shape.to_string(), dtype_name(w.dtype)));
  }
  return {};
}

std::string place(const ConstTensorView& t, std::int64_t i) {
  return t.rank() == 2 ? fmt::format("[{}, {}]", i / t.dim(1), i % t.dim(1))
                       : fmt::format("[{}]", i);
}

// F32, BF16, F16, F8_E8M0 or F8_E4M3 numbers, all finite.
Status check_finite(const std::string& field, const ConstTensorView& t) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, t.shape.num_elements());
  for (std::int64_t i = 0; i < count; ++i) {
    const float v = load_as_f32(t.data, t.dtype, i);
    if (!std::isfinite(v)) {
      return invalid(fmt::format("{}: got {} at {}, need finite numbers", field, v, place(t, i)));
    }
  }
  return {};
}

// Kernels without a NaN among their codes would read a number.
Status check_e4m3(const std::string& field, const ConstTensorView& t) {
  const auto* const codes = t.as<std::uint8_t>();
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, t.shape.num_elements());
  const auto is_nan = [](std::uint8_t code) { return (code & 0x7F) == 0x7F; };
  constexpr std::int64_t kBlock = 4096;  // without a branch for each
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(count, begin + kBlock);
    std::uint8_t any = 0;
    for (std::int64_t i = begin; i < end; ++i)
      any = std::max(any, static_cast<std::uint8_t>(is_nan(codes[i])));
    if (any == 0 || MOESAIC_FAULT(experts_nan_codes_are_numbers)) continue;
    const std::int64_t at = std::find_if(codes + begin, codes + end, is_nan) - codes;
    return invalid(fmt::format("{}: got the NaN code 0x{:02X} at {}, need finite e4m3 values",
                               field, codes[at], place(t, at)));
  }
  return {};
}

Status check_floats(const std::string& field, const ConstTensorView& t, DType dtype,
                    const Shape& need) {
  MOESAIC_RETURN_IF_ERROR(expect_dtype(field, t, dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, t, need));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, t));
  return check_finite(field, t);
}

// Shape of the finest scales of a [rows, columns] matrix of so many parts.
Shape scale_shape(const OperandQuant& w, std::int64_t parts, std::int64_t rows,
                  std::int64_t columns) {
  switch (w.granularity) {
    case ScaleGranularity::kChannel:
      return {rows};
    case ScaleGranularity::kBlock:
    case ScaleGranularity::kGroup:
      return {parts * ceil_div(rows / parts, w.block_n), ceil_div(columns, w.block_k)};
    default:
      return {1};
  }
}

DType scale_dtype(const OperandQuant& w, const ConstTensorView& scale) {
  if (w.scale_format == ScaleFormat::kE8M0) return DType::kF8E8M0;
  if (w.scale_format == ScaleFormat::kE4M3) return DType::kF8E4M3;
  // Scales of integers are stored in the model's dtype; they are widened when loaded.
  const bool integer = w.dtype != DType::kF8E4M3;
  const bool half = scale.dtype == DType::kBF16 || scale.dtype == DType::kF16;
  return integer && half ? scale.dtype : DType::kF32;
}

Status check_zero(const std::string& field, const ConstTensorView& zero, const Shape& need) {
  if (zero.dtype != DType::kU8 && zero.dtype != DType::kI8) {
    return {StatusCode::kInvalidDType,
            fmt::format("{}: got {}, need U8 or I8", field, dtype_name(zero.dtype))};
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, zero, need));
  return expect_contiguous(field, zero);
}

Status check_perm(const std::string& field, const ConstTensorView& perm, std::int64_t columns) {
  MOESAIC_RETURN_IF_ERROR(expect_dtype(field, perm, DType::kI32));
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, perm, {columns}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, perm));
  std::vector<bool> seen(static_cast<std::size_t>(columns));
  for (std::int64_t k = 0; k < columns; ++k) {
    const std::int32_t from = perm.as<std::int32_t>()[k];
    if (from < 0 || from >= columns || seen[static_cast<std::size_t>(from)]) {
      return invalid(fmt::format("{}: got {} at [{}], need each of 0 .. {} once", field, from, k,
                                 columns - 1));
    }
    seen[static_cast<std::size_t>(from)] = true;
  }
  return {};
}

Status check_scales(const std::string& field, const ProjectionView& v, const OperandQuant& w,
                    std::int64_t rows, std::int64_t columns) {
  const Shape shape = scale_shape(w, v.parts, rows, columns);
  const std::string scale = field + "_scale", zero = field + "_zero", min = field + "_min",
                    global = field + "_global_scale", channel = field + "_channel_scale";
  const DType dtype = scale_dtype(w, v.scale);
  const auto present = [&](const std::string& name, const ConstTensorView& t, bool wanted,
                           const Shape& need, DType type) {
    return check_presence(name, t, wanted, w, need, dtype_name(type));
  };
  const bool scaled = w.granularity != ScaleGranularity::kNone;
  MOESAIC_RETURN_IF_ERROR(present(scale, v.scale, scaled, shape, dtype));
  if (scaled) MOESAIC_RETURN_IF_ERROR(check_floats(scale, v.scale, dtype, shape));
  const bool has_zero = w.zero_point == ZeroPoint::kInteger;
  MOESAIC_RETURN_IF_ERROR(present(zero, v.zero, has_zero, shape, DType::kU8));
  if (has_zero) MOESAIC_RETURN_IF_ERROR(check_zero(zero, v.zero, shape));
  const bool has_min = w.zero_point == ZeroPoint::kMin;
  MOESAIC_RETURN_IF_ERROR(present(min, v.min, has_min, shape, DType::kF32));
  if (has_min) MOESAIC_RETURN_IF_ERROR(check_floats(min, v.min, DType::kF32, shape));
  const bool has_global = w.outer_scale == OuterScale::kTensor;
  MOESAIC_RETURN_IF_ERROR(present(global, v.global_scale, has_global, {1}, DType::kF32));
  if (has_global) MOESAIC_RETURN_IF_ERROR(check_floats(global, v.global_scale, DType::kF32, {1}));
  const bool has_channel = w.outer_scale == OuterScale::kChannel;
  MOESAIC_RETURN_IF_ERROR(present(channel, v.channel_scale, has_channel, {rows}, DType::kF32));
  if (!has_channel) return {};
  return check_floats(channel, v.channel_scale, DType::kF32, {rows});
}

// A static activation scale is a positive number.
Status check_input_scale(const std::string& field, const ConstTensorView& t, const OperandQuant& a,
                         const OperandQuant& w) {
  const bool wanted = quant::has_static_scale(a);
  MOESAIC_RETURN_IF_ERROR(check_presence(field, t, wanted, w, {1}, "F32"));
  if (!wanted) return {};
  MOESAIC_RETURN_IF_ERROR(check_floats(field, t, DType::kF32, {1}));
  const float v = t.as<float>()[0];
  if (v > 0) return {};
  return invalid(fmt::format("{}: got {}, need a positive scale", field, v));
}

Status check_projection(const std::string& field, const ProjectionView& v, std::int64_t rows,
                        std::int64_t columns, const MoeProblem& p) {
  const OperandQuant& w = p.quant.weight;
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, v.weight, {rows, columns}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, v.weight));
  MOESAIC_RETURN_IF_ERROR(expect_dtype(field, v.weight, w.dtype));
  if (w.dtype == DType::kF8E4M3) MOESAIC_RETURN_IF_ERROR(check_e4m3(field, v.weight));
  MOESAIC_RETURN_IF_ERROR(check_scales(field, v, w, rows, columns));
  MOESAIC_RETURN_IF_ERROR(
      check_input_scale(field + "_input_scale", v.input_scale, p.quant.activation, w));
  MOESAIC_RETURN_IF_ERROR(
      check_presence(field + "_perm", v.perm, w.act_order, w, {columns}, "I32"));
  if (!w.act_order) return {};
  return check_perm(field + "_perm", v.perm, columns);
}

Status check_bias(std::string_view field, const ConstTensorView& bias, std::int64_t size,
                  bool wanted) {
  if (!wanted) {
    if (!bias.present()) return {};
    return invalid(
        fmt::format("{}: got {}, but has_expert_bias is false", field, bias.shape.to_string()));
  }
  if (!bias.present()) {
    return invalid(fmt::format("{}: got none, has_expert_bias needs [{}]", field, size));
  }
  if (bias.dtype != DType::kF32 && bias.dtype != DType::kBF16) {
    return {StatusCode::kInvalidDType,
            fmt::format("{}: got {}, need F32 or BF16", field, dtype_name(bias.dtype))};
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, bias, {size}));
  return expect_contiguous(field, bias);
}

Status check_one_expert(const MoeProblem& p, const ExpertWeightsView& v) {
  const std::int64_t n = w13_rows(p), h = p.hidden_size, i = p.intermediate_size;
  for (const ExpertField& field : kExpertFields) {  // before a value of them is read
    if (p.device.is_cuda()) break;                  // whose experts may come from either memory
    MOESAIC_RETURN_IF_ERROR(expect_device(field.name, v.*field.view, Device::cpu()));
  }
  ProjectionView w13 = w13_of(v);
  w13.parts = w13_parts(p);
  MOESAIC_RETURN_IF_ERROR(check_projection("w13", w13, n, h, p));
  MOESAIC_RETURN_IF_ERROR(check_projection("w2", w2_of(v), h, i, p));
  MOESAIC_RETURN_IF_ERROR(check_bias("w13_bias", v.w13_bias, n, p.has_expert_bias));
  return check_bias("w2_bias", v.w2_bias, h, p.has_expert_bias);
}

}  // namespace

Status check_expert_weights(const MoeProblem& problem, const ExpertWeightsView& weights,
                            std::int64_t local_expert) {
  const Status status = check_one_expert(problem, weights);
  return status.ok() ? status : status.with_context(fmt::format("expert {}", local_expert));
}

}  // namespace moesaic::experts
