#include "moesaic/spec.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "core/routing_spec.h"
#include "core/spec_fields.h"

namespace moesaic {
namespace {

Status not_negative_finite(std::string_view field, double value) {
  if (std::isfinite(value) && value >= 0) return {};
  return invalid(fmt::format("{}: got {}, need a finite number >= 0", field, value));
}

Status validate_layer_routing(const MoeLayerSpec& spec) {
  const RoutingSpec& r = spec.routing;
  if (r.num_experts != spec.num_experts) {
    return invalid(fmt::format("routing.num_experts: got {}, need num_experts {} of the layer",
                               r.num_experts, spec.num_experts));
  }
  MOESAIC_RETURN_IF_ERROR(validate_routing(r));
  if (r.method == RoutingMethod::kHash) {
    // Token ids are of 32 bits.
    return between("hash_vocabulary", spec.hash_vocabulary, 1,
                   std::numeric_limits<std::int32_t>::max(), "2^31-1");
  }
  if (spec.hash_vocabulary == 0) return {};
  return invalid(fmt::format("hash_vocabulary: got {} with method {}, need 0", spec.hash_vocabulary,
                             routing_method_name(r.method)));
}

Status validate_shared(const MoeLayerSpec& spec) {
  const SharedExpertSpec& shared = spec.shared;
  if (shared.activation) {
    MOESAIC_RETURN_IF_ERROR(validate(*shared.activation).with_context("shared"));
  }
  if (shared.intermediate_size > 0) return {};
  if (shared.gated_output) {
    return invalid("shared.gated_output: got true without a shared expert, need false");
  }
  if (shared.activation) {
    return invalid("shared.activation: got one without a shared expert, need none");
  }
  return {};
}

// Every stacked tensor must have a size that 63-bit byte offsets can address.
Status validate_sizes(const MoeLayerSpec& spec) {
  const auto addressable = [&](std::int64_t experts, std::int64_t width) {
    auto n = checked_mul(experts, width);
    if (n) n = checked_mul(*n, spec.hidden_size);
    if (n) n = checked_mul(*n, 8);  // two projections of at most 4 bytes per element
    return n.has_value();
  };
  if (addressable(spec.num_experts, spec.intermediate_size) &&
      addressable(1, spec.shared.intermediate_size)) {
    return {};
  }
  return {StatusCode::kLimitExceeded,
          fmt::format("weights of {} experts, intermediate_size {} (shared {}) and hidden_size {} "
                      "exceed 63-bit sizes",
                      spec.num_experts, spec.intermediate_size, spec.shared.intermediate_size,
                      spec.hidden_size)};
}

}  // namespace

Status validate(const MoeLayerSpec& spec) {
  MOESAIC_RETURN_IF_ERROR(at_least("layer", spec.layer, -1));
  MOESAIC_RETURN_IF_ERROR(at_least("hidden_size", spec.hidden_size, 1));
  MOESAIC_RETURN_IF_ERROR(at_least("intermediate_size", spec.intermediate_size, 1));
  MOESAIC_RETURN_IF_ERROR(at_least("num_experts", spec.num_experts, 1));
  MOESAIC_RETURN_IF_ERROR(at_least("shared.intermediate_size", spec.shared.intermediate_size, 0));
  MOESAIC_RETURN_IF_ERROR(validate_sizes(spec));
  MOESAIC_RETURN_IF_ERROR(validate_layer_routing(spec));
  if (!MOESAIC_FAULT(spec_takes_any_activation)) {
    MOESAIC_RETURN_IF_ERROR(validate(spec.activation));
  }
  MOESAIC_RETURN_IF_ERROR(validate_shared(spec));
  MOESAIC_RETURN_IF_ERROR(not_negative_finite("input_norm_eps", spec.input_norm_eps));
  return expect_float_dtype("activation_dtype", spec.activation_dtype);
}

}  // namespace moesaic
