// Activation functions between the two expert GEMMs: names and constants. Formulas:
// docs/concepts.md.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

#include "moesaic/kinds.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

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
// "silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "situ", "silu_no_mul", "gelu_no_mul", ...;
// "unknown", and not gated, for a value outside the enumeration.
std::string_view activation_name(ActivationKind kind);
// Accepts the names above and the aliases gelu_pytorch_tanh, swigluoai_uninterleave, relu2.
// kNotFound otherwise.
Result<ActivationKind> activation_from_name(std::string_view name);

// Constants as a configuration states them (swiglu_limit, ...); empty: not stated.
struct ActivationParams {
  std::optional<float> limit;
  std::optional<float> alpha;
  std::optional<float> beta;      // kSitu: B
  std::optional<float> up_limit;  // kSitu: L2
};

// The spec of an activation named as in activation_from_name. By name:
//   swigluoai                fixes limit 7, alpha 1.702, beta 1; stating anything else is an error
//   swigluoai_uninterleave   needs limit; alpha 1 and beta 0 unless stated
//   swiglustep               limit 7 unless stated
//   situ                     needs beta (B); up_limit off unless stated
//   silu                     takes a limit
//   all others               take none
// kInvalidArgument names the constant, the value found and what is needed; kNotFound as
// activation_from_name.
Result<ActivationSpec> make_activation(std::string_view name, const ActivationParams& params = {});

// Checks that the kind is one, every constant is one that it uses, and in range: limit > 0, not NaN; B > 0; a
// constant that the kind ignores has its default. kInvalidArgument otherwise.
Status validate(const ActivationSpec& spec);

}  // namespace moesaic
