#include "gate/reference/gate.h"

#include <cmath>

#include "numerics/codec.h"

namespace moesaic::gate {

void ref_gate_logits(const ConstTensorView& x, const ConstTensorView& weight,
                     const ConstTensorView& bias, double* logits, double* magnitude) {
  const std::int64_t num_experts = weight.dim(0);
  const std::int64_t hidden_size = weight.dim(1);
  for (std::int64_t t = 0; t < x.dim(0); ++t) {
    for (std::int64_t e = 0; e < num_experts; ++e) {
      double sum = 0, abs_sum = 0;
      for (std::int64_t i = 0; i < hidden_size; ++i) {
        const double xi = load_as_f32(x.data, x.dtype, t * x.strides[0] + i * x.strides[1]);
        const double wi = load_as_f32(weight.data, weight.dtype, e * hidden_size + i);
        sum += xi * wi;
        abs_sum += std::abs(xi * wi);
      }
      if (bias.present()) {
        const double b = load_as_f32(bias.data, bias.dtype, e * bias.strides[0]);
        sum += b;
        abs_sum += std::abs(b);
      }
      logits[t * num_experts + e] = sum;
      if (magnitude != nullptr) magnitude[t * num_experts + e] = abs_sum;
    }
  }
}

}  // namespace moesaic::gate
