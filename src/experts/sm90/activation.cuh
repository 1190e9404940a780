// Activations inside the GEMM1 epilogue, fp32. Formulas and NaN rules:
// activation/reference/activation.cc. exp and the reciprocal are the hardware's approximations
// (about 2 ulp each): relative error of the result below 2^-20 for |alpha * gate| <= 16, far under
// the bf16 rounding that follows.
#pragma once

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "experts/sm90/grouped_gemm.h"
#include "moesaic/kinds.h"

namespace moesaic::cuda {

__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kMinusLog2E = -1.4426950408889634F;
  return ptx::reciprocal_approx(1.0F + ptx::exp2_approx(x * kMinusLog2E));
}

// NaN stays.
__device__ __forceinline__ float at_most(float v, float limit) { return ptx::min_nan(v, limit); }
__device__ __forceinline__ float within(float v, float limit) {
  return ptx::max_nan(at_most(v, limit), -limit);
}

// Activation families, as the kernel's template parameter. kGated: rows of w13 are gate and up
// rows. kFullGroups: full groups have the tokens as the M operand. kRoutes: the kernel can route.
// The SwiGLU family: silu, swigluoai, swiglustep and gelu_tanh (grouped_activation). An infinite gate
// that no limit cuts becomes NaN.
struct SwigluEpilogue {
  static constexpr EpilogueKind kKind = EpilogueKind::kSwiglu;
  static constexpr bool kGated = true, kFullGroups = true, kRoutes = true;
  static __device__ __forceinline__ float activate(const GroupedActivation& a, float gate,
                                                   float up) {
    return activate_within(a, a.most_gate, gate, up);
  }

 protected:
  static __device__ __forceinline__ float activate_within(const GroupedActivation& a,
                                                          float most_gate, float gate, float up) {
    MOESAIC_CUDA_FAULT(cuda_experts_gate_and_up_swapped, const float swapped = gate; gate = up;
                       up = swapped;)
    const float g = at_most(gate, most_gate);
    const float u = within(up, a.limit);
    float cubic = a.cubic * g;
    MOESAIC_CUDA_FAULT(cuda_experts_cubic_term_missing, cubic = 0.0F;)
    const float power = g * fmaf(cubic, g, a.slope);
    const float swish = g * ptx::reciprocal_approx(1.0F + ptx::exp2_approx(power));
    // As many instructions as (u + beta) * swish, and registers enough in groups of 144 columns.
    return fmaf(swish, u, swish * a.beta);
  }
};

// Without swiglustep, where one constant more is too many (int4-g128: 16 bytes of stack in groups of 136
// columns, 4 % at 1024 tokens; 1 to 2 % at one).
struct SwigluOneLimitEpilogue : SwigluEpilogue {
  static __device__ __forceinline__ float activate(const GroupedActivation& a, float gate,
                                                   float up) {
    return activate_within(a, a.limit, gate, up);
  }
};

// Squared ReLU, not gated. NaN stays.
struct Relu2Epilogue {
  static constexpr EpilogueKind kKind = EpilogueKind::kRelu2;
  static constexpr bool kGated = false, kFullGroups = false, kRoutes = true;
  static __device__ __forceinline__ float activate(const GroupedActivation&, float x, float) {
    const float positive = x < 0.0F ? 0.0F : x;
    return positive * positive;
  }
};

// Every kind but silu and swigluoai, with the sigmoid that Math has.
template <class Math>
__device__ __forceinline__ float activate_as(const GroupedActivation& a, float gate, float up) {
  constexpr float kInvSqrt2 = 0.70710678118654752F, kSqrt2OverPi = 0.79788456080286536F;
  const auto gelu = [](float v) { return 0.5F * v * erfcf(-v * kInvSqrt2); };
  const auto gelu_tanh = [](float v) {
    return v * Math::sigmoid(2.0F * kSqrt2OverPi * (v + 0.044715F * v * v * v));
  };
  switch (static_cast<ActivationKind>(a.kind)) {
    case ActivationKind::kGelu:
      return gelu(gate) * up;
    case ActivationKind::kGeluTanh:
      return gelu_tanh(gate) * up;
    case ActivationKind::kSwigluStep:
      return at_most(gate * Math::sigmoid(gate), a.limit) * within(up, a.limit);
    case ActivationKind::kSitu: {
      const float u = a.up_limit > 0.0F ? a.up_limit * tanhf(up / a.up_limit) : up;
      return a.beta * tanhf(gate / a.beta) * Math::sigmoid(gate) * u;
    }
    case ActivationKind::kSiluNoMul:
      return gate * Math::sigmoid(gate);
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

struct ApproximateMath {
  static __device__ __forceinline__ float sigmoid(float x) { return cuda::sigmoid(x); }
};
// Any kind: a switch over the call's.
struct AnyActivation {
  static constexpr bool kFullGroups = false, kRoutes = false;
  static __device__ __forceinline__ float activate(const GroupedActivation& a, float gate,
                                                   float up) {
    return activate_as<ApproximateMath>(a, gate, up);
  }
};
struct GeneralEpilogue : AnyActivation {
  static constexpr EpilogueKind kKind = EpilogueKind::kGeneral;
  static constexpr bool kGated = true;
};
struct PlainEpilogue : AnyActivation {
  static constexpr EpilogueKind kKind = EpilogueKind::kPlain;
  static constexpr bool kGated = false;
};

}  // namespace moesaic::cuda
