#include "activation/reference/activation.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/fault.h"

namespace moesaic::activation {
namespace {

// Read once: ref_activate runs for every element.
const bool kFaultClampGateBelow = MOESAIC_FAULT(activation_clamp_gate_below);
const bool kFaultDropBeta = MOESAIC_FAULT(activation_drop_beta);
const bool kFaultStepClampsFirst = MOESAIC_FAULT(activation_step_clamps_first);

template <class T>
T sigmoid(T x) {
  return T{1} / (T{1} + std::exp(-x));
}

template <class T>
T silu(T x) {
  return x * sigmoid(x);
}

// x/2 (1 + erf(x/sqrt 2)), written with erfc because 1 + erf cancels for negative x.
template <class T>
T gelu(T x) {
  return T{0.5} * x * std::erfc(-x * (std::numbers::sqrt2_v<T> / T{2}));
}

// x/2 (1 + tanh y), y = sqrt(2/pi) (x + 0.044715 x^3); (1 + tanh y)/2 = sigmoid(2y) does not
// cancel.
template <class T>
T gelu_tanh(T x) {
  const T sqrt_2_over_pi = std::numbers::sqrt2_v<T> * std::numbers::inv_sqrtpi_v<T>;
  const T y = sqrt_2_over_pi * (x + static_cast<T>(0.044715) * x * x * x);
  return x * sigmoid(T{2} * y);
}

template <class T>
void activate_row(const ActivationSpec& spec, GateUpLayout layout, const T* in, T* out,
                  std::int64_t d) {
  if (MOESAIC_FAULT(activation_swap_gate_up)) {
    if (layout == GateUpLayout::kGateThenUp) {
      layout = GateUpLayout::kUpThenGate;
    } else if (layout == GateUpLayout::kUpThenGate) {
      layout = GateUpLayout::kGateThenUp;
    }
  }
  // Ascending i never writes what a later i reads, except kUpThenGate and kGateThenUp read d + i,
  // which is never written: in place is safe in every layout.
  for (std::int64_t i = 0; i < d; ++i) {
    const GateUpIndex at = gate_up_index(layout, i, d);
    out[i] = ref_activate(spec, in[at.gate], in[at.up]);
  }
}

}  // namespace

// std::min and std::max return their first argument when a comparison with NaN fails, and
// std::clamp its value: with the data first, NaN passes through every limit.
template <class T>
T ref_activate(const ActivationSpec& spec, T gate, T up) {
  const T limit = spec.limit;
  switch (spec.kind) {
    case ActivationKind::kSilu: {
      // A second bound on the gate would go unnoticed but for large negative values.
      const T g = kFaultClampGateBelow ? std::clamp(gate, -limit, limit) : std::min(gate, limit);
      return silu(g) * std::clamp(up, -limit, limit);
    }
    case ActivationKind::kGelu:
      return gelu(gate) * up;
    case ActivationKind::kGeluTanh:
      return gelu_tanh(gate) * up;
    case ActivationKind::kSwigluOai: {
      const T g = std::min(gate, limit);
      const T u = std::clamp(up, -limit, limit);
      const T beta = kFaultDropBeta ? T{0} : static_cast<T>(spec.beta);
      return (u + beta) * (g * sigmoid(static_cast<T>(spec.alpha) * g));
    }
    case ActivationKind::kSwigluStep:
      if (kFaultStepClampsFirst) {
        return silu(std::min(gate, limit)) * std::clamp(up, -limit, limit);
      }
      return std::min(silu(gate), limit) * std::clamp(up, -limit, limit);
    case ActivationKind::kSitu: {
      const T b = spec.beta;
      const T l2 = spec.up_limit;
      const T u = l2 > T{0} ? l2 * std::tanh(up / l2) : up;
      return b * std::tanh(gate / b) * sigmoid(gate) * u;
    }
    case ActivationKind::kSiluNoMul:
      return silu(gate);
    case ActivationKind::kGeluNoMul:
      return gelu(gate);
    case ActivationKind::kGeluTanhNoMul:
      return gelu_tanh(gate);
    case ActivationKind::kRelu2NoMul: {
      const T x = std::max(gate, T{0});
      return x * x;
    }
  }
  return std::numeric_limits<T>::quiet_NaN();
}
template float ref_activate(const ActivationSpec& spec, float gate, float up);
template double ref_activate(const ActivationSpec& spec, double gate, double up);

void ref_activation(const ActivationSpec& spec, GateUpLayout layout, const float* in, float* out,
                    std::int64_t intermediate_size) {
  activate_row(spec, layout, in, out, intermediate_size);
}

void ref_activation_f64(const ActivationSpec& spec, GateUpLayout layout, const double* in,
                        double* out, std::int64_t intermediate_size) {
  activate_row(spec, layout, in, out, intermediate_size);
}

}  // namespace moesaic::activation
