// Activations inside the GEMM1 epilogue, fp32. Formulas and NaN rules:
// activation/reference/activation.cc. exp and the reciprocal are the hardware's approximations
// (about 2 ulp each): relative error of the result below 2^-20 for |alpha * gate| <= 16, far under
// the bf16 rounding that follows.
#pragma once

#include "cuda/ptx/sync.cuh"
#include "experts/sm90/grouped_gemm.h"
#include "moesaic/activation.h"

namespace moesaic::cuda {

__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kMinusLog2E = -1.4426950408889634F;
  return ptx::reciprocal_approx(1.0F + ptx::exp2_approx(x * kMinusLog2E));
}

// Comparisons keep NaN: a NaN is never greater than a limit.
__device__ __forceinline__ float at_most(float v, float limit) { return v > limit ? limit : v; }
__device__ __forceinline__ float within(float v, float limit) {
  return v > limit ? limit : (v < -limit ? -limit : v);
}

template <EpilogueKind kEpilogue>
__device__ __forceinline__ float activate(const GroupedParams& p, float gate, float up) {
  if constexpr (kEpilogue == EpilogueKind::kSwiglu) {
    const float g = at_most(gate, p.limit);
    const float u = within(up, p.limit);
    return (u + p.beta) * (g * sigmoid(p.alpha * g));
  } else {
    constexpr float kInvSqrt2 = 0.70710678118654752F, kSqrt2OverPi = 0.79788456080286536F;
    const auto gelu = [](float v) { return 0.5F * v * erfcf(-v * kInvSqrt2); };
    const auto gelu_tanh = [](float v) {
      return v * sigmoid(2.0F * kSqrt2OverPi * (v + 0.044715F * v * v * v));
    };
    switch (static_cast<ActivationKind>(p.activation_kind)) {
      case ActivationKind::kGelu:
        return gelu(gate) * up;
      case ActivationKind::kGeluTanh:
        return gelu_tanh(gate) * up;
      case ActivationKind::kSwigluStep:
        return at_most(gate * sigmoid(gate), p.limit) * within(up, p.limit);
      case ActivationKind::kSitu: {
        const float u = p.up_limit > 0.0F ? p.up_limit * tanhf(up / p.up_limit) : up;
        return p.beta * tanhf(gate / p.beta) * sigmoid(gate) * u;
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
      default:
        return __int_as_float(0x7FC00000);
    }
  }
}

}  // namespace moesaic::cuda
