// Activation functions between the two expert GEMMs: names and constants. Formulas:
// docs/concepts.md.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "moesaic/status.h"

namespace moesaic {

// Arrangement of the gate and up rows of w13 and of the columns of GEMM1's output. Never implied.
enum class GateUpLayout : std::uint8_t { kGateThenUp, kUpThenGate, kInterleaved, kNonGated };

enum class ActivationKind : std::uint8_t {
  kSilu,        // g*sigmoid(g)*u; with limit L: g=min(g,L), u=clamp(u,-L,L) first
  kGelu,        // erf form, times u
  kGeluTanh,    // tanh form, times u
  kSwigluOai,   // (u'+beta) * g'*sigmoid(alpha*g'), g'=min(g,L), u'=clamp(u,-L,L)
  kSwigluStep,  // min(silu(g),L) * clamp(u,-L,L): clamps after silu
  kSitu,        // B*tanh(g/B)*sigmoid(g) * (L2>0 ? L2*tanh(u/L2) : u)
  kSiluNoMul,   // pointwise, not gated
  kGeluNoMul,
  kGeluTanhNoMul,
  kRelu2NoMul,  // max(x,0)^2
};

// A kind with all its constants. There are no hidden defaults: make_activation fills what the kind
// fixes and refuses what the kind needs but was not given.
struct ActivationSpec {
  ActivationKind kind = ActivationKind::kSilu;
  float limit = std::numeric_limits<float>::infinity();  // infinity: no clamp
  float alpha = 1.0F;
  float beta = 0.0F;      // kSitu: B
  float up_limit = 0.0F;  // kSitu: L2 (<= 0: off)
  bool operator==(const ActivationSpec&) const = default;
};

bool is_gated(ActivationKind kind);
// "silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "situ", "silu_no_mul", "gelu_no_mul", ...
std::string_view activation_name(ActivationKind kind);
// Accepts the names above and the aliases gelu_pytorch_tanh, swigluoai_uninterleave, relu2.
// kNotFound otherwise.
Result<ActivationKind> activation_from_name(std::string_view name);

}  // namespace moesaic
