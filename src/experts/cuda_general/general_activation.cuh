// The activations in fp32 with the accuracy of the math library, for layers whose intermediate may
// stay in F32. Formulas and NaN rules: activation/reference/activation.cc.
#pragma once

#include "experts/sm90/activation.cuh"

namespace moesaic::cuda {

struct LibraryMath {
  static __device__ __forceinline__ float sigmoid(float v) { return 1.0F / (1.0F + expf(-v)); }
};

__device__ __forceinline__ float general_activate(const GroupedActivation& a, float gate,
                                                  float up) {
  const float g = at_most(gate, a.limit);
  switch (static_cast<ActivationKind>(a.kind)) {
    case ActivationKind::kSilu:
      return g * LibraryMath::sigmoid(g) * within(up, a.limit);
    case ActivationKind::kSwigluOai:
      return (within(up, a.limit) + a.beta) * (g * LibraryMath::sigmoid(a.alpha * g));
    default:
      return activate_as<LibraryMath>(a, gate, up);
  }
}

}  // namespace moesaic::cuda
