#include "experts/matrix_form.h"

#include <fmt/format.h>

#include <cstdint>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "numerics/element.h"

namespace moesaic::experts {
namespace {

// Codes of a byte each as nibbles, low ones first.
Status pack_codes(const OperandQuant& form, const std::string& field, const ConstTensorView& from,
                  Tensor& to) {
  const std::int64_t rows = from.dim(0), columns = from.dim(1);
  MOESAIC_ASSIGN_OR_RETURN(to, Tensor::zeros(form.dtype, {rows, columns}));
  const int least = form.dtype == DType::kI4 ? -8 : 0;
  const auto* const codes = from.as<std::int8_t>();
  auto* const nibbles = to.as<std::uint8_t>();
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const std::int8_t code = codes[i];
    if (code < least || code > least + 15) {
      return invalid(
          fmt::format("{}: got code {} at row {}, column {}, need {} to {} (quant.forms)", field,
                      code, i / columns, i % columns, least, least + 15));
    }
    nibbles[i / 2] = static_cast<std::uint8_t>(nibbles[i / 2] | (code & 15) << (i % 2 * 4));
  }
  return {};
}

// One number of each `times` neighbours in a row.
Status join_groups(const std::string& field, std::int64_t times, const ConstTensorView& from,
                   Tensor& to) {
  const std::int64_t rows = from.dim(0), groups = from.dim(1), joined = ceil_div(groups, times);
  MOESAIC_ASSIGN_OR_RETURN(to, Tensor::zeros(DType::kF32, {rows, joined}));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const float v = load_as_f32(from.data, from.dtype, row * groups + g);
      float& of_all = to.as<float>()[row * joined + g / times];
      if (g % times == 0) of_all = v;
      if (v == of_all || MOESAIC_FAULT(experts_form_takes_any_groups)) continue;
      return invalid(
          fmt::format("{}: got {} at row {}, group {}, need {} as in the group before "
                      "(quant.forms)",
                      field, v, row, g, of_all));
    }
  }
  return {};
}

Status check_zeros(const std::string& field, const ConstTensorView& min) {
  const std::int64_t groups = min.dim(1);
  for (std::int64_t i = 0; i < min.dim(0) * groups; ++i) {
    const float v = load_as_f32(min.data, min.dtype, i);
    if (v == 0 || MOESAIC_FAULT(experts_form_drops_minima)) continue;
    return invalid(fmt::format("{}: got {} at row {}, group {}, need 0 (quant.forms)", field, v,
                               i / groups, i % groups));
  }
  return {};
}

}  // namespace

Result<ProjectionView> FormedMatrix::narrow(const OperandQuant& wide, const OperandQuant& form,
                                            std::int64_t e, std::string_view field,
                                            const ProjectionView& view) {
  if (form == wide) return view;
  const auto called = [&](std::string_view what) {
    return fmt::format("expert {}: {}{}", e, field, what);
  };
  ProjectionView formed = view;
  if (form.dtype != wide.dtype) {
    MOESAIC_RETURN_IF_ERROR(pack_codes(form, called(""), view.weight, weight_));
    formed.weight = weight_.view();
  }
  const std::int64_t times = form.block_k / wide.block_k;
  if (times > 1) {
    MOESAIC_RETURN_IF_ERROR(join_groups(called("_scale"), times, view.scale, scale_));
    formed.scale = scale_.view();
  }
  if (!view.min.present()) return formed;
  if (form.zero_point == ZeroPoint::kNone) {
    MOESAIC_RETURN_IF_ERROR(check_zeros(called("_min"), view.min));
    formed.min = {};
  } else if (times > 1) {
    MOESAIC_RETURN_IF_ERROR(join_groups(called("_min"), times, view.min, min_));
    formed.min = min_.view();
  }
  return formed;
}

}  // namespace moesaic::experts
