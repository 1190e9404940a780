#include "checkpoint/routing_config.h"

#include <fmt/format.h>

#include <optional>
#include <string>

#include "checkpoint/names.h"
#include "core/fault.h"

namespace moesaic {
namespace {

Result<ScoringFunc> read_scoring(const ConfigFields& fields, const RoutingRule& rule) {
  if (!rule.reads_scoring_func) return rule.scoring_func;
  MOESAIC_ASSIGN_OR_RETURN(const auto name, fields.string("scoring_func"));
  if (!name) return rule.scoring_func;
  for (const ScoringFunc func :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    if (*name == scoring_func_name(func)) return func;
  }
  return Status(StatusCode::kUnsupported,
                fmt::format("{}: scoring_func: got {}, need softmax, sigmoid or sqrtsoftplus",
                            fields.where(), quote_name(*name)));
}

// greedy: plain top-k; group_limited_greedy: groups ranked by their best expert; noaux_tc: with a
// selection bias, groups ranked by their two best.
struct TopkMethod {
  bool groups = false;
  bool bias = false;
};

Result<TopkMethod> read_topk_method(const ConfigFields& fields, const RoutingRule& rule) {
  if (rule.default_topk_method.empty()) return TopkMethod{rule.reads_groups, false};
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.string("topk_method"));
  const std::string name = stated.value_or(std::string(rule.default_topk_method));
  if (name == "greedy") return TopkMethod{false, false};
  if (name == "group_limited_greedy") return TopkMethod{true, false};
  if (name == "noaux_tc") return TopkMethod{true, true};
  return Status(
      StatusCode::kUnsupported,
      fmt::format("{}: topk_method: got {}, need greedy, group_limited_greedy or noaux_tc",
                  fields.where(), quote_name(name)));
}

Status read_groups(const ConfigFields& fields, const RoutingRule& rule, RoutingSpec* routing) {
  MOESAIC_ASSIGN_OR_RETURN(const auto groups, fields.integer("n_group", {1, routing->num_experts}));
  MOESAIC_ASSIGN_OR_RETURN(const auto kept,
                           fields.integer("topk_group", {1, routing->num_experts}));
  routing->num_expert_group = groups.value_or(rule.default_n_group);
  routing->topk_group = kept.value_or(rule.default_topk_group);
  if (routing->topk_group > routing->num_expert_group) {
    return fields.bad_value("topk_group", fmt::to_string(routing->topk_group),
                            fmt::format("at most n_group {}", routing->num_expert_group));
  }
  if (routing->num_experts % routing->num_expert_group != 0) {
    return fields.bad_value("n_group", fmt::to_string(routing->num_expert_group),
                            fmt::format("a divisor of the {} experts", routing->num_experts));
  }
  // One group restricts nothing: the plain method, which every backend has.
  if (routing->num_expert_group > 1 && !MOESAIC_FAULT(checkpoint_groups_ignored)) {
    routing->method = RoutingMethod::kGroupedTopK;
  }
  return {};
}

Result<bool> read_bias(const ConfigFields& fields, const RoutingRule& rule,
                       const TopkMethod& method, bool* by_presence) {
  *by_presence = false;
  switch (rule.bias) {
    case BiasRule::kNone:
      return false;
    case BiasRule::kAlways:
      return true;
    case BiasRule::kTopkMethod:
      return method.bias;
    case BiasRule::kUseRoutingBias: {
      MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.boolean("use_routing_bias"));
      *by_presence = !stated.has_value();
      return stated.value_or(true);
    }
  }
  return false;
}

Result<double> read_scale(const ConfigFields& fields, const RoutingRule& rule,
                          const RoutingSpec& routing) {
  if (rule.scale == ScaleRule::kNone) return 1.0;
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.number("routed_scaling_factor"));
  const double scale = stated.value_or(rule.default_scale);
  if (!(scale > 0)) {
    return fields.bad_value("routed_scaling_factor", fmt::to_string(scale), "> 0");
  }
  const bool renormalized = routing.renormalize && routing.top_k > 1;
  if (rule.scale == ScaleRule::kUnlessRenormalized && renormalized) return 1.0;
  return scale;
}

}  // namespace

Result<RoutingSpec> read_routing(const ConfigFields& fields, const Family& family,
                                 std::int64_t num_experts, bool* bias_by_presence) {
  const RoutingRule& rule = family.routing;
  RoutingSpec routing;
  routing.method = rule.method;
  routing.num_experts = num_experts;
  MOESAIC_ASSIGN_OR_RETURN(routing.top_k,
                           fields.required_integer(top_k_fields(), {1, num_experts}));
  MOESAIC_ASSIGN_OR_RETURN(routing.scoring_func, read_scoring(fields, rule));
  MOESAIC_ASSIGN_OR_RETURN(const TopkMethod method, read_topk_method(fields, rule));
  if (method.groups) MOESAIC_RETURN_IF_ERROR(read_groups(fields, rule, &routing));
  MOESAIC_ASSIGN_OR_RETURN(routing.has_correction_bias,
                           read_bias(fields, rule, method, bias_by_presence));
  routing.renormalize = rule.renorm == RenormRule::kAlways;
  if (rule.renorm == RenormRule::kNormTopkProb) {
    MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.boolean("norm_topk_prob"));
    routing.renormalize = stated.value_or(rule.default_norm_topk_prob);
    // DeepSeek-V2 leaves a single selected weight as it is.
    if (rule.scale == ScaleRule::kUnlessRenormalized && routing.top_k == 1) {
      routing.renormalize = false;
    }
  }
  MOESAIC_ASSIGN_OR_RETURN(routing.routed_scaling_factor, read_scale(fields, rule, routing));
  return routing;
}

}  // namespace moesaic
