// What a RoutingSpec may hold: one answer for layers and routers.
#include "core/routing_spec.h"

#include <fmt/format.h>

#include <cmath>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "core/spec_fields.h"

namespace moesaic {
namespace {

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

bool selects_on_scores(RoutingMethod method) {
  switch (method) {
    case RoutingMethod::kTopK:
    case RoutingMethod::kGroupedTopK:
    case RoutingMethod::kZeroExpert:
    case RoutingMethod::kHash:
      return true;
    default:
      return false;
  }
}

// A number that the rule does not read stays as a spec has it that says nothing.
Status validate_unread_numbers(const RoutingSpec& r) {
  if (MOESAIC_FAULT(router_ignores_unread_numbers)) return {};
  const RoutingSpec unsaid;
  struct Number {
    std::string_view field;
    double got, unsaid;
    bool read;
  };
  const bool by_sum = r.renormalize && selects_on_scores(r.method);
  for (const Number& n :
       {Number{"renorm_floor", r.renorm_floor, unsaid.renorm_floor, by_sum},
        Number{"renorm_epsilon", r.renorm_epsilon, unsaid.renorm_epsilon, by_sum},
        Number{"p_norm", r.p_norm, unsaid.p_norm, r.method == RoutingMethod::kPNorm},
        Number{"jitter_eps", r.jitter_eps, unsaid.jitter_eps,
               r.method == RoutingMethod::kSparseMixer}}) {
    if (n.read || n.got == n.unsaid) continue;
    return invalid(
        fmt::format("routing.{}: got {} with method {} and renormalize {}, which do not "
                    "read it; need {}",
                    n.field, n.got, routing_method_name(r.method), r.renormalize, n.unsaid));
  }
  return {};
}

// Methods whose rule is fixed refuse settings that they would otherwise ignore in silence.
Status validate_fixed_rules(const RoutingSpec& r) {
  const auto method = routing_method_name(r.method);
  if (scoring_func_name(r.scoring_func) == "unknown") {
    return invalid(fmt::format("routing.scoring_func: got {}, need one of ScoringFunc",
                               static_cast<int>(r.scoring_func)));
  }
  if (r.has_correction_bias && !selects_on_scores(r.method)) {
    return invalid(
        fmt::format("routing.has_correction_bias: got true with method {}, need false", method));
  }
  if (r.method == RoutingMethod::kZeroExpert && !r.has_correction_bias) {
    return invalid(
        "routing.has_correction_bias: got false with method zero_expert, need true: identity "
        "experts are chosen by a bias over all experts");
  }
  if (r.method == RoutingMethod::kLlama4 && r.renormalize) {
    return invalid("routing.renormalize: got true with method llama4, need false");
  }
  if (r.method == RoutingMethod::kPNorm && r.renormalize) {
    return invalid("routing.renormalize: got true with method p_norm, need false");
  }
  if (r.method == RoutingMethod::kSimulated && r.renormalize) {
    return invalid(
        "routing.renormalize: got true with method simulated, need false: the strategy's weights "
        "are final");
  }
  const bool fixed_softmax = r.method == RoutingMethod::kPNorm ||
                             r.method == RoutingMethod::kTopKSoftmax ||
                             r.method == RoutingMethod::kSparseMixer;
  if (fixed_softmax && r.scoring_func != ScoringFunc::kSoftmax) {
    return invalid(fmt::format("routing.scoring_func: got {} with method {}, need softmax",
                               scoring_func_name(r.scoring_func), method));
  }
  // Its weights are sigmoids; softmax is the value of a spec that says nothing.
  if (r.method == RoutingMethod::kLlama4 && r.scoring_func == ScoringFunc::kSqrtSoftplus) {
    return invalid(
        "routing.scoring_func: got sqrtsoftplus with method llama4, need sigmoid or softmax (the "
        "default)");
  }
  return validate_unread_numbers(r);
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

Status validate_routing(const RoutingSpec& r) {
  MOESAIC_RETURN_IF_ERROR(at_least("routing.num_experts", r.num_experts, 1));
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
  MOESAIC_RETURN_IF_ERROR(zero_or_normal_f32("routing.renorm_epsilon", r.renorm_epsilon));
  return validate_fixed_rules(r);
}

}  // namespace moesaic
