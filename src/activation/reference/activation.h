// Activations as plain formulas, the truth for faster versions. One element or one row; fp32 with
// the standard library's functions, and float64 for oracles. Formulas: docs/concepts.md.
#pragma once

#include <cstdint>

#include "moesaic/activation.h"

namespace moesaic::activation {

// act(gate, up) for gated kinds, act(gate) for the others (`up` is ignored). The spec is valid
// (validate()). NaN in either used operand gives NaN. Defined for T = float and double.
template <class T>
T ref_activate(const ActivationSpec& spec, T gate, T up);
extern template float ref_activate(const ActivationSpec& spec, float gate, float up);
extern template double ref_activate(const ActivationSpec& spec, double gate, double up);

// Where element i of a row of d outputs finds its gate and up. kNonGated: both are i.
struct GateUpIndex {
  std::int64_t gate = 0;
  std::int64_t up = 0;
};
constexpr GateUpIndex gate_up_index(GateUpLayout layout, std::int64_t i, std::int64_t d) {
  switch (layout) {
    case GateUpLayout::kGateThenUp:
      return {i, d + i};
    case GateUpLayout::kUpThenGate:
      return {d + i, i};
    case GateUpLayout::kInterleaved:
      return {2 * i, 2 * i + 1};
    case GateUpLayout::kNonGated:
      break;
  }
  return {i, i};
}

// One row. in: [2I] as `layout` says (gated), or [I] (kNonGated); out: [I], which may be `in`
// itself but not overlap it otherwise. Error of the float version against float64: a few fp32 ulp
// per element, relative to the element.
void ref_activation(const ActivationSpec& spec, GateUpLayout layout, const float* in, float* out,
                    std::int64_t intermediate_size);
void ref_activation_f64(const ActivationSpec& spec, GateUpLayout layout, const double* in,
                        double* out, std::int64_t intermediate_size);

}  // namespace moesaic::activation
