#include "quant/arguments.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "numerics/element.h"

namespace moesaic::quant {

std::string dtype_set_text(DTypeMask dtypes) {
  std::string text;
  for (unsigned d = 0; d < 32; ++d) {
    if ((dtypes >> d & 1U) == 0) continue;
    // The last name follows "or", the others a comma.
    const bool last = dtypes >> d == 1U;
    if (!text.empty()) text += last ? " or " : ", ";
    text += dtype_name(static_cast<DType>(d));
  }
  return text;
}

Status check_arguments(std::initializer_list<Argument> arguments) {
  for (const Argument& a : arguments) {
    if ((a.dtypes & accept(a.view.dtype)) == 0) {
      return Status(StatusCode::kInvalidDType, std::string(a.field) + ": got " +
                                                   std::string(dtype_name(a.view.dtype)) +
                                                   ", need " + dtype_set_text(a.dtypes));
    }
    MOESAIC_RETURN_IF_ERROR(expect_shape(a.field, a.view, a.shape));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous(a.field, a.view));
    MOESAIC_RETURN_IF_ERROR(expect_device(a.field, a.view, Device::cpu()));
    MOESAIC_RETURN_IF_ERROR(contiguous_bytes(a.view.dtype, a.view.shape).status());
  }
  for (const Argument* a = arguments.begin(); a != arguments.end(); ++a) {
    for (const Argument* b = arguments.begin(); b != a; ++b) {
      if (!a->written && !b->written) continue;
      MOESAIC_RETURN_IF_ERROR(expect_no_overlap(b->field, b->view, a->field, a->view));
    }
  }
  return {};
}

Status expect_positive(std::string_view field, std::int64_t value) {
  if (value >= 1) return {};
  return Status(StatusCode::kInvalidArgument,
                std::string(field) + ": got " + std::to_string(value) + ", need a number >= 1");
}

Status expect_matrix(std::string_view field, const ConstTensorView& t) {
  if (t.rank() == 2) return {};
  return Status(StatusCode::kInvalidShape,
                std::string(field) + ": got " + t.shape.to_string() + ", need rank 2");
}

float max_abs(const ConstTensorView& t, std::int64_t begin, std::int64_t count) {
  float amax = 0.0F;
  for (std::int64_t i = begin; i < begin + count; ++i) {
    amax = std::max(amax, std::abs(load_as_f32(t.data, t.dtype, i)));
  }
  return amax;
}

Status expect_finite(std::string_view field, const ConstTensorView& t) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, t.shape.num_elements());
  const std::int64_t cols = t.rank() > 0 ? t.dim(t.rank() - 1) : 1;
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = load_as_f32(t.data, t.dtype, i);
    if (std::isfinite(x)) continue;
    return Status(StatusCode::kInvalidArgument,
                  std::string(field) + ": row " + std::to_string(i / cols) + ", column " +
                      std::to_string(i % cols) + ": got " + (std::isnan(x) ? "NaN" : "infinity") +
                      ", need a finite number");
  }
  return {};
}

}  // namespace moesaic::quant
