// Checks of tensor arguments, shared by the quantisers and layouts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

using DTypeMask = std::uint32_t;  // one bit per DType
template <class... D>
constexpr DTypeMask accept(D... dtypes) {
  // No bit of its own for a value outside the enumeration.
  return ((dtypes <= DType::kU4 ? DTypeMask{1} << static_cast<unsigned>(dtypes) : 0U) | ...);
}
inline constexpr DTypeMask kPlainFloats = accept(DType::kF32, DType::kBF16, DType::kF16);
inline constexpr DTypeMask kWords = accept(DType::kI32, DType::kU32);  // of packed codes

// One tensor argument of a call: its name in messages, what it may be, whether the call writes it.
struct Argument {
  std::string_view field;
  ConstTensorView view;
  DTypeMask dtypes;
  Shape shape;
  bool written = false;
};

// Checks that each argument has its dtype and shape, is contiguous, present if it has elements,
// and overlaps no argument that is written. kInvalidDType, kInvalidShape, kInvalidArgument,
// kInvalidLayout, kAliasing; the text has the field, the value found and the value needed.
Status check_arguments(std::initializer_list<Argument> arguments);

// kInvalidArgument "group: got 0, need a number >= 1".
Status expect_positive(std::string_view field, std::int64_t value);
// kInvalidShape unless the tensor has rank 2.
Status expect_matrix(std::string_view field, const ConstTensorView& t);

// "F32, BF16 or F16".
std::string dtype_set_text(DTypeMask dtypes);

// Largest magnitude of `count` elements from `begin` on, NaN elements not counted; 0 for none.
float max_abs(const ConstTensorView& t, std::int64_t begin, std::int64_t count);
inline float max_abs(const float* x, std::int64_t count) {
  float amax = 0.0F;
  // std::max keeps its first argument when the second is NaN.
  for (std::int64_t i = 0; i < count; ++i) amax = std::max(amax, std::abs(x[i]));
  return amax;
}

// kInvalidArgument naming the row and column (of the last dimension) of the first NaN or infinity.
Status expect_finite(std::string_view field, const ConstTensorView& t);

}  // namespace moesaic::quant
