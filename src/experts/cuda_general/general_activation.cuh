// The activations in fp32 with the accuracy of the math library, for layers whose intermediate may
// stay in F32. Formulas and NaN rules: activation/reference/activation.cc.
#pragma once

#include "experts/sm90/grouped_gemm.h"
#include "moesaic/activation.h"

namespace moesaic::cuda {

__device__ __forceinline__ float general_activate(const GroupedActivation& a, float gate,
                                                  float up) {
  constexpr float kInvSqrt2 = 0.70710678118654752F, kSqrt2OverPi = 0.79788456080286536F;
  const auto sigmoid = [](float v) { return 1.0F / (1.0F + expf(-v)); };
  const auto gelu = [](float v) { return 0.5F * v * erfcf(-v * kInvSqrt2); };
  const auto gelu_tanh = [&](float v) {
    return v * sigmoid(2.0F * kSqrt2OverPi * (v + 0.044715F * v * v * v));
  };
  // Comparisons keep NaN: a NaN is never greater than a limit.
  const auto at_most = [](float v, float limit) { return v > limit ? limit : v; };
  const auto within = [](float v, float limit) {
    return v > limit ? limit : (v < -limit ? -limit : v);
  };
  switch (static_cast<ActivationKind>(a.kind)) {
    case ActivationKind::kSilu: {
      const float g = at_most(gate, a.limit);
      return g * sigmoid(g) * within(up, a.limit);
    }
    case ActivationKind::kSwigluOai: {
      const float g = at_most(gate, a.limit);
      return (within(up, a.limit) + a.beta) * (g * sigmoid(a.alpha * g));
    }
    case ActivationKind::kSwigluStep:
      return at_most(gate * sigmoid(gate), a.limit) * within(up, a.limit);
    case ActivationKind::kGelu:
      return gelu(gate) * up;
    case ActivationKind::kGeluTanh:
      return gelu_tanh(gate) * up;
    case ActivationKind::kSitu: {
      const float u = a.up_limit > 0.0F ? a.up_limit * tanhf(up / a.up_limit) : up;
      return a.beta * tanhf(gate / a.beta) * sigmoid(gate) * u;
    }
    case ActivationKind::kSiluNoMul:
      return gate * sigmoid(gate);
    case ActivationKind::kGeluNoMul:
      return gelu(gate);
    case ActivationKind::kGeluTanhNoMul:
      return gelu_tanh(gate);
    case ActivationKind::kRelu2NoMul: {
      const float x = gate < 0.0F ? 0.0F : gate;
      return x * x;
    }
  }
  return __int_as_float(0x7FC00000);
}

}  // namespace moesaic::cuda
