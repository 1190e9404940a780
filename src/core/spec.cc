#include "moesaic/spec.h"

#include <fmt/format.h>

#include <cmath>

#include "core/checked.h"
#include "core/refusal.h"

namespace moesaic {
namespace {

Status at_least(std::string_view field, std::int64_t value, std::int64_t least) {
  if (value >= least) return {};
  return invalid(fmt::format("{}: got {}, need at least {}", field, value, least));
}

Status between(std::string_view field, std::int64_t value, std::int64_t low, std::int64_t high,
               std::string_view high_name) {
  if (value >= low && value <= high) return {};
  return invalid(fmt::format("{}: got {}, need {} to {} ({})", field, value, low, high, high_name));
}

Status not_negative_finite(std::string_view field, double value) {
  if (std::isfinite(value) && value >= 0) return {};
  return invalid(fmt::format("{}: got {}, need a finite number >= 0", field, value));
}

// Routers compute in fp32: a double that is 0, subnormal or infinite there is another number.
bool is_normal_f32(double value) { return std::isnormal(static_cast<float>(value)); }

Status positive_f32(std::string_view field, double value) {
  const auto rounded = static_cast<float>(value);
  if (std::isfinite(rounded) && rounded > 0) return {};
  return invalid(fmt::format("{}: got {}, need a number that fp32 represents, > 0", field, value));
}

Status zero_or_normal_f32(std::string_view field, double value) {
  if (value == 0 || (value > 0 && is_normal_f32(value))) return {};
  return invalid(fmt::format("{}: got {}, need 0 or a normal fp32 number > 0 (1.2e-38 to 3.4e38)",
                             field, value));
}

Status validate_p_norm(double p) {
  // The root is a power too.
  if (p > 0 && is_normal_f32(p) && is_normal_f32(1 / static_cast<double>(static_cast<float>(p)))) {
    return {};
  }
  return invalid(fmt::format(
      "routing.p_norm: got {}, need a number > 0 that fp32 represents, as its inverse", p));
}

Status validate_groups(const RoutingSpec& r) {
  const std::int64_t groups = r.num_expert_group;
  MOESAIC_RETURN_IF_ERROR(
      between("routing.num_expert_group", groups, 1, r.num_experts, "num_experts"));
  MOESAIC_RETURN_IF_ERROR(
      between("routing.topk_group", r.topk_group, 1, groups, "num_expert_group"));
  if (r.method != RoutingMethod::kGroupedTopK) {
    if (groups == 1) return {};
    return invalid(fmt::format(
        "routing.num_expert_group: got {} with method {}, need 1 or method {}", groups,
        routing_method_name(r.method), routing_method_name(RoutingMethod::kGroupedTopK)));
  }
  if (r.num_experts % groups != 0) {
    return invalid(fmt::format("routing.num_expert_group: got {}, need a divisor of num_experts {}",
                               groups, r.num_experts));
  }
  const std::int64_t group_size = r.num_experts / groups;
  if ((r.has_correction_bias || r.group_by_best_two) && group_size < 2) {
    // Such a group is ranked by its two best experts; one expert has no second best.
    return invalid(
        fmt::format("routing.num_expert_group: got {} groups of one expert with {}, "
                    "need at least 2 experts in a group",
                    groups, r.has_correction_bias ? "a correction bias" : "group_by_best_two"));
  }
  const std::int64_t reachable = r.topk_group * group_size;
  if (r.top_k > reachable) {
    return invalid(
        fmt::format("routing.top_k: got {}, need at most {} (topk_group {} x {} experts per group)",
                    r.top_k, reachable, r.topk_group, group_size));
  }
  return {};
}

Status validate_method(const RoutingSpec& r) {
  const bool zero_experts = r.method == RoutingMethod::kZeroExpert;
  if (zero_experts != (r.num_zero_experts > 0)) {
    return invalid(fmt::format("routing.num_zero_experts: got {} with method {}, need {}",
                               r.num_zero_experts, routing_method_name(r.method),
                               zero_experts ? "at least 1" : "0 or method zero_expert"));
  }
  if (r.method == RoutingMethod::kSparseMixer) {
    MOESAIC_RETURN_IF_ERROR(between("routing.top_k", r.top_k, 2, 2, "fixed by sparse_mixer"));
    if (r.renormalize) {
      return invalid("routing.renormalize: got true with method sparse_mixer, need false");
    }
    MOESAIC_RETURN_IF_ERROR(zero_or_normal_f32("routing.jitter_eps", r.jitter_eps));
  }
  if (r.method == RoutingMethod::kPNorm) {
    MOESAIC_RETURN_IF_ERROR(validate_p_norm(r.p_norm));
  }
  if (r.group_by_best_two && r.method != RoutingMethod::kGroupedTopK) {
    return invalid(fmt::format("routing.group_by_best_two: got true with method {}, need false",
                               routing_method_name(r.method)));
  }
  if (r.has_expert_scale && r.method != RoutingMethod::kTopK) {
    return invalid(fmt::format("routing.has_expert_scale: got true with method {}, need false",
                               routing_method_name(r.method)));
  }
  return {};
}

Status validate_routing(const MoeLayerSpec& spec) {
  const RoutingSpec& r = spec.routing;
  if (r.num_experts != spec.num_experts) {
    return invalid(fmt::format("routing.num_experts: got {}, need num_experts {} of the layer",
                               r.num_experts, spec.num_experts));
  }
  if (routing_method_name(r.method) == "unknown") {
    return invalid(fmt::format("routing.method: got {}, need one of RoutingMethod",
                               static_cast<int>(r.method)));
  }
  MOESAIC_RETURN_IF_ERROR(at_least("routing.num_zero_experts", r.num_zero_experts, 0));
  const auto columns = checked_add(r.num_experts, r.num_zero_experts);
  if (!columns) {
    return {StatusCode::kLimitExceeded, "routing: num_experts + num_zero_experts exceeds 63 bits"};
  }
  MOESAIC_RETURN_IF_ERROR(
      between("routing.top_k", r.top_k, 1, *columns,
              r.num_zero_experts > 0 ? "num_experts + num_zero_experts" : "num_experts"));
  MOESAIC_RETURN_IF_ERROR(validate_groups(r));
  MOESAIC_RETURN_IF_ERROR(validate_method(r));
  MOESAIC_RETURN_IF_ERROR(positive_f32("routing.routed_scaling_factor", r.routed_scaling_factor));
  MOESAIC_RETURN_IF_ERROR(zero_or_normal_f32("routing.renorm_floor", r.renorm_floor));
  return zero_or_normal_f32("routing.renorm_epsilon", r.renorm_epsilon);
}

Status validate_activation(const ActivationSpec& a) {
  if (activation_name(a.kind) == "unknown") {
    return invalid(fmt::format("activation.kind: got {}, need one of ActivationKind",
                               static_cast<int>(a.kind)));
  }
  // Infinity is the documented "no clamp"; NaN fails the comparison.
  if (!(a.limit > 0)) {
    return invalid(fmt::format("activation.limit: got {}, need > 0 (infinity: no clamp)", a.limit));
  }
  for (const auto& [field, value] :
       {std::pair{"activation.alpha", a.alpha}, std::pair{"activation.beta", a.beta},
        std::pair{"activation.up_limit", a.up_limit}}) {
    if (!std::isfinite(value)) {
      return invalid(fmt::format("{}: got {}, need a finite number", field, value));
    }
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

std::string_view routing_method_name(RoutingMethod method) {
  switch (method) {
    case RoutingMethod::kTopK:
      return "topk";
    case RoutingMethod::kGroupedTopK:
      return "grouped_topk";
    case RoutingMethod::kTopKSoftmax:
      return "topk_softmax";
    case RoutingMethod::kLlama4:
      return "llama4";
    case RoutingMethod::kSparseMixer:
      return "sparse_mixer";
    case RoutingMethod::kPNorm:
      return "p_norm";
    case RoutingMethod::kZeroExpert:
      return "zero_expert";
    case RoutingMethod::kHash:
      return "hash";
    case RoutingMethod::kCustom:
      return "custom";
    case RoutingMethod::kSimulated:
      return "simulated";
  }
  return "unknown";
}

std::string_view scoring_func_name(ScoringFunc func) {
  switch (func) {
    case ScoringFunc::kSoftmax:
      return "softmax";
    case ScoringFunc::kSigmoid:
      return "sigmoid";
    case ScoringFunc::kSqrtSoftplus:
      return "sqrtsoftplus";
  }
  return "unknown";
}

Status validate(const MoeLayerSpec& spec) {
  MOESAIC_RETURN_IF_ERROR(at_least("layer", spec.layer, -1));
  MOESAIC_RETURN_IF_ERROR(at_least("hidden_size", spec.hidden_size, 1));
  MOESAIC_RETURN_IF_ERROR(at_least("intermediate_size", spec.intermediate_size, 1));
  MOESAIC_RETURN_IF_ERROR(at_least("num_experts", spec.num_experts, 1));
  MOESAIC_RETURN_IF_ERROR(at_least("shared.intermediate_size", spec.shared.intermediate_size, 0));
  MOESAIC_RETURN_IF_ERROR(validate_sizes(spec));
  MOESAIC_RETURN_IF_ERROR(validate_routing(spec));
  MOESAIC_RETURN_IF_ERROR(validate_activation(spec.activation));
  if (spec.shared.activation) {
    MOESAIC_RETURN_IF_ERROR(validate_activation(*spec.shared.activation).with_context("shared"));
  }
  MOESAIC_RETURN_IF_ERROR(not_negative_finite("input_norm_eps", spec.input_norm_eps));
  if (spec.shared.gated_output && spec.shared.intermediate_size == 0) {
    return invalid("shared.gated_output: got true without a shared expert, need false");
  }
  return expect_float_dtype("activation_dtype", spec.activation_dtype);
}

}  // namespace moesaic
