#include "quant/mx.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/grouped_rows.h"

namespace moesaic {
namespace {

constexpr DTypeMask kElements = accept(DType::kF8E4M3, DType::kF4E2M1);
constexpr DTypeMask kMxScales = accept(DType::kF8E8M0, DType::kU8);

float largest(MxElement element) { return element == MxElement::kE4m3 ? kE4m3Max : kE2m1Max; }
// Exponent of the element format's largest power of two.
int emax(MxElement element) { return element == MxElement::kE4m3 ? 8 : 2; }

MxElement element_of(const ConstTensorView& q) {
  return q.dtype == DType::kF8E4M3 ? MxElement::kE4m3 : MxElement::kE2m1;
}
// Bytes of a group's codes.
std::int64_t code_bytes(MxElement element) {
  return element == MxElement::kE4m3 ? kMxGroupSize : kMxGroupSize / 2;
}

Status check_mx(std::string_view name, const ConstTensorView& x, bool x_written,
                const ConstTensorView& q, const ConstTensorView& scale) {
  MOESAIC_ASSIGN_OR_RETURN(const Shape grid, grouped_shape(name, x.shape, kMxGroupSize));
  return check_arguments({
      {name, x, kPlainFloats, x.shape, x_written},
      {"q", q, kElements, x.shape, !x_written},
      {"scale", scale, kMxScales, grid, !x_written},
  });
}

}  // namespace

std::uint8_t mx_scale(float amax, MxElement element, E8m0Rule rule) {
  if (MOESAIC_FAULT(quant_mx_always_ocp)) rule = E8m0Rule::kOcpFloor;
  switch (rule) {
    case E8m0Rule::kCeil:
      return e8m0_scale_ceil(amax, largest(element));
    case E8m0Rule::kOcpFloor:
      return e8m0_scale_ocp_floor(amax, emax(element));
    case E8m0Rule::kRound175:
      return e8m0_scale_round_1_75(amax, emax(element));
  }
  return kE8m0Nan;
}

void ref_quantize_mx_row(const float* x, std::int64_t k, MxElement element, E8m0Rule rule,
                         std::uint8_t* q, std::uint8_t* scale, std::int64_t scale_stride) {
  for (std::int64_t g = 0; g < k / kMxGroupSize; ++g, x += kMxGroupSize) {
    float amax = 0.0F;
    for (std::int64_t i = 0; i < kMxGroupSize; ++i) amax = std::max(amax, std::abs(x[i]));
    const std::uint8_t byte = mx_scale(amax, element, rule);
    scale[g * scale_stride] = byte;
    std::uint8_t* codes = q + g * code_bytes(element);
    if (byte == 0) {
      std::fill_n(codes, code_bytes(element), std::uint8_t{0});
      continue;
    }
    const float divisor = f32_from_e8m0(byte);
    for (std::int64_t i = 0; i < kMxGroupSize; ++i) {
      if (element == MxElement::kE4m3) {
        codes[i] = e4m3_from_f32(x[i] / divisor);
      } else {
        set_nibble(codes, i, e2m1_from_f32(x[i] / divisor));
      }
    }
  }
}

Status quantize_mx(ConstTensorView x, E8m0Rule rule, TensorView q, TensorView scale) {
  MOESAIC_RETURN_IF_ERROR(check_mx("x", x, false, q, scale));
  MOESAIC_RETURN_IF_ERROR(expect_finite("x", x));
  const MxElement element = element_of(q);
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t groups, scale.shape.num_elements());
  for_groups<kMxGroupSize>(x, groups, [&](const float* values, std::int64_t g) {
    ref_quantize_mx_row(values, kMxGroupSize, element, rule,
                        q.as<std::uint8_t>() + g * code_bytes(element),
                        scale.as<std::uint8_t>() + g);
  });
  return {};
}

Status dequantize_mx(ConstTensorView q, ConstTensorView scale, TensorView out) {
  MOESAIC_RETURN_IF_ERROR(check_mx("out", out, true, q, scale));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t groups, scale.shape.num_elements());
  for (std::int64_t g = 0; g < groups; ++g) {
    // The first scale of a row stands for a kernel that forgets to advance along K.
    const std::int64_t per_row = scale.dim(scale.rank() - 1);
    const std::int64_t which = MOESAIC_FAULT(quant_mx_stale_scale) ? g - g % per_row : g;
    const float s = f32_from_e8m0(scale.as<std::uint8_t>()[which]);
    for (std::int64_t i = 0; i < kMxGroupSize; ++i) {
      const std::int64_t at = g * kMxGroupSize + i;
      const float value = load_as_f32(q.data, q.dtype, at);
      if (std::isnan(s) || std::isnan(value)) {
        return Status(StatusCode::kInvalidArgument, std::string(std::isnan(s) ? "scale" : "q") +
                                                        ": row " + std::to_string(g / per_row) +
                                                        ", group " + std::to_string(g % per_row) +
                                                        ": got NaN, need a number");
      }
      store_from_f32(out.data, out.dtype, at, value * s);
    }
  }
  return {};
}

}  // namespace moesaic
