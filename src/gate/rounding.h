// What happens to a logit between the gate's fp32 sum and the router.
#pragma once

#include <cstdint>
#include <string>

#include "moesaic/dtype.h"
#include "moesaic/status.h"

namespace moesaic::gate {

// `v` rounded to nearest even to F32, BF16 or F16 and widened again.
float rounded_to(float v, DType dtype);

// Both roundings, each to F32 (none), BF16 or F16.
struct LogitRounding {
  DType linear = DType::kF32;  // first: the dtype of a linear that is not computed in fp32
  DType logits = DType::kF32;

  bool none() const { return linear == DType::kF32 && logits == DType::kF32; }
  float of(float v) const { return rounded_to(rounded_to(v, linear), logits); }
  void apply(float* logits_f32, std::int64_t count) const;
};

// "fp32 sums", "fp32 sums rounded to F16, then to BF16".
std::string describe(const LogitRounding& rounding);

// A linear in 16 bits (rounding.linear) takes rows of its dtype only, kUnsupported else: nothing
// here would round them to it.
Status check_linear_input(DType x_dtype, const LogitRounding& rounding);

}  // namespace moesaic::gate
