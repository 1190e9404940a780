#include "checkpoint/config/routing_config.h"

#include <fmt/format.h>

#include <array>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

Result<ScoringFunc> read_scoring(const ConfigFields& fields, const RoutingRule& rule) {
  if (rule.scoring_field.empty()) return rule.scoring_func;
  MOESAIC_ASSIGN_OR_RETURN(const auto name, fields.string(rule.scoring_field));
  if (!name) return rule.scoring_func;
  for (const ScoringFunc func :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    if (func == ScoringFunc::kSoftmax && !rule.may_be_softmax) continue;
    if (*name == scoring_func_name(func)) return func;
  }
  return Status(
      StatusCode::kUnsupported,
      fmt::format("{}: {}: got {}, need {}sigmoid or sqrtsoftplus", fields.where(),
                  rule.scoring_field, quote_name(*name), rule.may_be_softmax ? "softmax, " : ""));
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
  constexpr std::string_view kKept = "topk_group";
  MOESAIC_ASSIGN_OR_RETURN(const auto groups,
                           fields.integer(rule.group_fields.list(), {1, routing->num_experts}));
  MOESAIC_ASSIGN_OR_RETURN(const auto kept, fields.integer(kKept, {1, routing->num_experts}));
  // transformers stops at null, vLLM takes one group.
  if (!groups && rule.default_n_group != 1) {
    MOESAIC_RETURN_IF_ERROR(fields.refuse_null(rule.group_fields.list(), "a number", "none",
                                               fmt::to_string(rule.default_n_group)));
  }
  if (!kept && rule.default_topk_group != 1) {
    MOESAIC_RETURN_IF_ERROR(fields.refuse_null(std::span(&kKept, 1), "a number", "none",
                                               fmt::to_string(rule.default_topk_group)));
  }
  routing->num_expert_group = groups.value_or(rule.default_n_group);
  routing->topk_group = kept.value_or(rule.default_topk_group);
  if (routing->topk_group > routing->num_expert_group) {
    return fields.bad_value(
        "topk_group", fmt::to_string(routing->topk_group),
        fmt::format("at most {} {}", rule.group_fields.names[0], routing->num_expert_group));
  }
  if (routing->num_experts % routing->num_expert_group != 0) {
    return fields.bad_value(rule.group_fields.names[0], fmt::to_string(routing->num_expert_group),
                            fmt::format("a divisor of the {} experts", routing->num_experts));
  }
  // One group restricts nothing: the plain method, which every backend has.
  if (routing->num_expert_group > 1 && !MOESAIC_FAULT(checkpoint_groups_ignored)) {
    routing->method = RoutingMethod::kGroupedTopK;
    routing->group_by_best_two = rule.group_by_best_two;
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
    case BiasRule::kStated: {
      std::optional<bool> stated;
      if (!rule.bias_field.empty()) {
        MOESAIC_ASSIGN_OR_RETURN(stated, fields.boolean(rule.bias_field));
      }
      *by_presence = !stated.has_value();
      return stated.value_or(true);
    }
  }
  return false;
}

Result<double> read_scale(const ConfigFields& fields, const RoutingRule& rule) {
  if (rule.scale == ScaleRule::kNone) return 1.0;
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.number(rule.scale_field));
  if (!stated && rule.default_scale != 1.0) {
    MOESAIC_RETURN_IF_ERROR(fields.refuse_null(std::span(&rule.scale_field, 1), "a number", "none",
                                               fmt::to_string(rule.default_scale)));
    if (!rule.scale_unsaid.empty()) {
      return fields.refuse_unsaid(rule.scale_field, rule.scale_unsaid);
    }
  }
  const double scale = stated.value_or(rule.default_scale);
  if (!(scale > 0)) return fields.bad_value(rule.scale_field, fmt::to_string(scale), "> 0");
  return scale;
}

// DBRX: null divides by nothing. Where the field is absent, as in the published files, weights are
// divided by their sum.
Status read_p_norm(const ConfigFields& fields, RoutingSpec* routing) {
  MOESAIC_ASSIGN_OR_RETURN(const auto p, fields.number("moe_normalize_expert_weights"));
  if (!p && !fields.is_null("moe_normalize_expert_weights") &&
      !MOESAIC_FAULT(checkpoint_unsaid_norm_is_none)) {
    return {};
  }
  if (!p) {
    routing->method = RoutingMethod::kTopK;
    return {};
  }
  if (!(*p > 0)) {
    return fields.bad_value("moe_normalize_expert_weights", fmt::to_string(*p), "> 0 or null");
  }
  routing->p_norm = *p;
  return {};
}

// LongCat: experts that return their input. Without them its experts are selected as all others'.
Status read_zero_experts(const ConfigFields& fields, RoutingSpec* routing) {
  constexpr std::int64_t kMaxZeroExperts = 16384;
  constexpr std::int64_t kDefaultZeroExperts = 256;
  MOESAIC_ASSIGN_OR_RETURN(const auto count,
                           fields.integer("zero_expert_num", {0, kMaxZeroExperts}));
  MOESAIC_ASSIGN_OR_RETURN(const auto type, fields.string("zero_expert_type"));
  if (type && *type != "identity") {
    return {StatusCode::kUnsupported, fmt::format("{}: zero_expert_type: got {}, need identity",
                                                  fields.where(), quote_name(*type))};
  }
  routing->num_zero_experts =
      count.value_or(fields.is_null("zero_expert_num") ? 0 : kDefaultZeroExperts);
  if (routing->num_zero_experts == 0) routing->method = RoutingMethod::kTopK;
  return {};
}

// What only one method has.
Status read_method_fields(const ConfigFields& fields, RoutingSpec* routing) {
  switch (routing->method) {
    case RoutingMethod::kPNorm:
      return read_p_norm(fields, routing);
    case RoutingMethod::kZeroExpert:
      return read_zero_experts(fields, routing);
    case RoutingMethod::kSparseMixer: {
      MOESAIC_ASSIGN_OR_RETURN(const auto eps, fields.number("router_jitter_noise"));
      if (eps && !(*eps >= 0)) {
        return fields.bad_value("router_jitter_noise", fmt::to_string(*eps), ">= 0");
      }
      routing->jitter_eps = eps.value_or(0.01);
      return {};
    }
    default:
      return {};
  }
}

Result<bool> read_renormalize(const ConfigFields& fields, const RoutingRule& rule,
                              const RoutingSpec& routing) {
  const std::int64_t top_k = routing.top_k;
  switch (rule.renorm) {
    case RenormRule::kNever:
      return false;
    case RenormRule::kAlways:
      return true;
    case RenormRule::kIfSeveral:
      return top_k > 1;
    case RenormRule::kOfSeveral:
      if (top_k > 1) return true;
      return Status(
          StatusCode::kAmbiguousFormat,
          fmt::format("{}: moe_topk: got 1, need 2 or more, since implementations disagree: "
                      "transformers renormalises a single weight to 1, vLLM and the "
                      "models' own code leave it as it is",
                      fields.where()));
    case RenormRule::kStatedForSigmoid:
      if (routing.scoring_func == ScoringFunc::kSoftmax) return true;
      if (routing.scoring_func != ScoringFunc::kSigmoid) {
        return fields.unsupported(fmt::format("{}: got {}, need softmax or sigmoid",
                                              rule.scoring_field,
                                              scoring_func_name(routing.scoring_func)));
      }
      [[fallthrough]];
    case RenormRule::kStated: {
      const std::array both = {rule.renorm_field, rule.renorm_alias};
      const auto names = std::span(both).first(rule.renorm_alias.empty() ? 1 : 2);
      MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.boolean(rule.renorm_field));
      std::optional<bool> alias;
      if (names.size() > 1) {
        MOESAIC_ASSIGN_OR_RETURN(alias, fields.boolean(rule.renorm_alias));
      }
      if (stated && alias && *stated != *alias) {
        return Status(
            StatusCode::kAmbiguousFormat,
            fmt::format("{}: {} is {} but {}, another name of the same field, is {}",
                        fields.where(), rule.renorm_field, *stated, rule.renorm_alias, *alias));
      }
      if (!stated && !alias && rule.default_renorm) {
        // To the models' own code null is as good as false.
        MOESAIC_RETURN_IF_ERROR(fields.refuse_null(names, "true or false", "false", "true"));
      }
      return stated.value_or(alias.value_or(rule.default_renorm));
    }
  }
  return false;
}

}  // namespace

Result<RoutingSpec> read_routing(const ConfigFields& fields, const Family& family,
                                 std::int64_t num_experts, bool* bias_by_presence) {
  const RoutingRule& rule = family.routing;
  RoutingSpec routing;
  routing.method = rule.method;
  routing.num_experts = num_experts;
  MOESAIC_RETURN_IF_ERROR(read_method_fields(fields, &routing));
  MOESAIC_ASSIGN_OR_RETURN(
      routing.top_k,
      fields.required_integer(top_k_fields(), {1, num_experts + routing.num_zero_experts}));
  MOESAIC_ASSIGN_OR_RETURN(routing.scoring_func, read_scoring(fields, rule));
  MOESAIC_ASSIGN_OR_RETURN(const TopkMethod method, read_topk_method(fields, rule));
  if (method.groups) MOESAIC_RETURN_IF_ERROR(read_groups(fields, rule, &routing));
  MOESAIC_ASSIGN_OR_RETURN(routing.has_correction_bias,
                           read_bias(fields, rule, method, bias_by_presence));
  MOESAIC_ASSIGN_OR_RETURN(routing.renormalize, read_renormalize(fields, rule, routing));
  if (rule.renorm_floor > 0 && routing.renormalize) {
    MOESAIC_ASSIGN_OR_RETURN(const auto floor, fields.number("moe_norm_min"));
    routing.renorm_floor = floor.value_or(rule.renorm_floor);
  }
  if (routing.renormalize) routing.renorm_epsilon = rule.renorm_epsilon;
  routing.has_expert_scale = !family.input_norm.expert_scale.empty();
  routing.scale_on_output = rule.scale == ScaleRule::kOnOutput;
  MOESAIC_ASSIGN_OR_RETURN(routing.routed_scaling_factor, read_scale(fields, rule));
  return routing;
}

}  // namespace moesaic::checkpoint
