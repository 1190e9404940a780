#include "quant/mx.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/fault.h"
#include "numerics/codec.h"
#include "quant/grouped_rows.h"

namespace moesaic::quant {
namespace {

// One type per element format; the loops below are instantiated for each.
struct E4m3 {
  static constexpr DType kDType = DType::kF8E4M3;
  static constexpr float kLargest = kE4m3Max;
  static constexpr int kMaxExponent = 8;  // of the largest power of two
  static void store(std::uint8_t* codes, std::int64_t i, float x) { codes[i] = e4m3_from_f32(x); }
};
struct E2m1 {
  static constexpr DType kDType = DType::kF4E2M1;
  static constexpr float kLargest = kE2m1Max;
  static constexpr int kMaxExponent = 2;
  static void store(std::uint8_t* codes, std::int64_t i, float x) {
    set_nibble(codes, i, e2m1_from_f32(x));
  }
};
constexpr DTypeMask kElements = accept(E4m3::kDType, E2m1::kDType);

template <class Use>
auto with_element(DType dtype, Use&& use) {
  return dtype == E4m3::kDType ? use(E4m3()) : use(E2m1());
}

constexpr DTypeMask kMxScales = accept(DType::kF8E8M0, DType::kU8);

// Bytes of a group's codes.
std::int64_t code_bytes(DType element) { return kMxGroupSize * dtype_bits(element) / 8; }

template <class Element>
std::uint8_t scale_byte(float amax, ExponentRule rule) {
  if (MOESAIC_FAULT(quant_mx_always_ocp)) rule = ExponentRule::kOcpFloor;
  switch (rule) {
    case ExponentRule::kCeil:
      return e8m0_scale_ceil(amax, Element::kLargest);
    case ExponentRule::kOcpFloor:
      return e8m0_scale_ocp_floor(amax, Element::kMaxExponent);
    case ExponentRule::kRound175:
      return e8m0_scale_round_1_75(amax, Element::kMaxExponent);
    case ExponentRule::kNone:
      break;
  }
  return kE8m0Nan;
}

template <class Element>
void quantize_row(const float* x, std::int64_t k, ExponentRule rule, std::uint8_t* q,
                  std::uint8_t* scale, std::int64_t scale_stride) {
  const std::int64_t bytes = code_bytes(Element::kDType);
  for (std::int64_t g = 0; g < k / kMxGroupSize; ++g, x += kMxGroupSize) {
    const std::uint8_t byte = scale_byte<Element>(max_abs(x, kMxGroupSize), rule);
    scale[g * scale_stride] = byte;
    std::uint8_t* codes = q + g * bytes;
    if (byte == 0) {
      std::fill_n(codes, bytes, std::uint8_t{0});
      continue;
    }
    const float divisor = f32_from_e8m0(byte);
    for (std::int64_t i = 0; i < kMxGroupSize; ++i) Element::store(codes, i, x[i] / divisor);
  }
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

std::uint8_t mx_scale(float amax, DType element, ExponentRule rule) {
  return with_element(element, [&](auto e) { return scale_byte<decltype(e)>(amax, rule); });
}

void ref_quantize_mx_row(const float* x, std::int64_t k, DType element, ExponentRule rule,
                         std::uint8_t* q, std::uint8_t* scale, std::int64_t scale_stride) {
  with_element(element,
               [&](auto e) { quantize_row<decltype(e)>(x, k, rule, q, scale, scale_stride); });
}

Status quantize_mx(ConstTensorView x, ExponentRule rule, TensorView q, TensorView scale) {
  MOESAIC_RETURN_IF_ERROR(check_mx("x", x, false, q, scale));
  MOESAIC_RETURN_IF_ERROR(expect_finite("x", x));
  const DType element = q.dtype;
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

}  // namespace moesaic::quant
