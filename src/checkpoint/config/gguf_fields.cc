#include "checkpoint/config/gguf_fields.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "checkpoint/config/config.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// The family's own function, as expert_gating_func would say it.
std::int64_t gating_of(const Family& family) {
  if (family.routing.method == RoutingMethod::kTopKSoftmax) return kGatingSoftmaxOfSelected;
  if (family.routing.scoring_func == ScoringFunc::kSqrtSoftplus) return kGatingSqrtSoftplus;
  const bool sigmoid = family.routing.scoring_func == ScoringFunc::kSigmoid ||
                       family.routing.method == RoutingMethod::kLlama4;
  return sigmoid ? kGatingSigmoid : kGatingSoftmax;
}

Status check_gating(const GgufMetadata& metadata, const Family& family) {
  MOESAIC_ASSIGN_OR_RETURN(const auto gating, metadata.integer("expert_gating_func", 0, 255));
  // 0: the writer left it to the architecture.
  if (!gating || *gating == 0 || *gating == gating_of(family)) return {};
  return metadata.bad(
      StatusCode::kAmbiguousFormat, fmt::format("{}.expert_gating_func", metadata.architecture()),
      fmt::format("got {}, need {} for {} models", *gating, gating_of(family), family.title));
}

// What the family does not leave to the file: the file may say so, but nothing else.
Status check_fixed_routing(const GgufMetadata& metadata, const GgufArchitecture& architecture,
                           const Family& family) {
  const RoutingRule& rule = family.routing;
  const auto key = [&](std::string_view name) {
    return fmt::format("{}.{}", metadata.architecture(), name);
  };
  MOESAIC_ASSIGN_OR_RETURN(const auto norm, metadata.boolean("expert_weights_norm"));
  if (norm && rule.renorm != RenormRule::kStated && rule.method == RoutingMethod::kTopK) {
    const bool need = rule.renorm != RenormRule::kNever;
    if (*norm != need) {
      return metadata.bad(StatusCode::kUnsupported, key("expert_weights_norm"),
                          fmt::format("got {}, need {} for {} models", *norm, need, family.title));
    }
  }
  // Its reference reader takes silence for false.
  if (!norm && rule.renorm == RenormRule::kAlways && rule.method == RoutingMethod::kTopK &&
      !architecture.unsaid_renorm && !MOESAIC_FAULT(gguf_accept_unsaid_renorm)) {
    return metadata.bad(StatusCode::kUnsupported, key("expert_weights_norm"),
                        fmt::format("missing, need true for {} models", family.title));
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto scale, metadata.number("expert_weights_scale"));
  if (scale && rule.scale == ScaleRule::kNone && *scale != 0 && *scale != 1) {
    return metadata.bad(StatusCode::kUnsupported, key("expert_weights_scale"),
                        fmt::format("got {}, need 1 for {} models", *scale, family.title));
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto groups,
                           metadata.integer("expert_group_count", 0, kMaxExperts));
  MOESAIC_ASSIGN_OR_RETURN(const auto used,
                           metadata.integer("expert_group_used_count", 0, kMaxExperts));
  if (!rule.reads_groups && groups.value_or(1) > 1 && used.value_or(0) != *groups) {
    return metadata.bad(StatusCode::kUnsupported, key("expert_group_count"),
                        fmt::format("got {}, need 1 for {} models", *groups, family.title));
  }
  return {};
}

// The experts' part of a config.json that says what the metadata say.
Result<nlohmann::json> routing_fields(const GgufMetadata& metadata, const Family& family,
                                      const GgufArchitecture& architecture) {
  nlohmann::json json = nlohmann::json::object();
  const RoutingRule& rule = family.routing;
  if (rule.renorm == RenormRule::kStated) {
    MOESAIC_ASSIGN_OR_RETURN(const auto renorm, metadata.boolean("expert_weights_norm"));
    json[std::string(rule.renorm_field)] = renorm.value_or(architecture.unsaid_renorm);
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto scale, metadata.number("expert_weights_scale"));
  // 0 means that there is none.
  if (rule.scale != ScaleRule::kNone && scale && *scale != 0) {
    json[std::string(rule.scale_field)] = *scale;
  } else if (rule.scale != ScaleRule::kNone) {
    json[std::string(rule.scale_field)] = 1.0;
  }
  if (rule.reads_groups) {
    MOESAIC_ASSIGN_OR_RETURN(const auto groups,
                             metadata.integer("expert_group_count", 0, kMaxExperts));
    MOESAIC_ASSIGN_OR_RETURN(const auto used,
                             metadata.integer("expert_group_used_count", 0, kMaxExperts));
    if (groups.value_or(0) > 0) json["n_group"] = *groups;
    if (used.value_or(0) > 0) json["topk_group"] = *used;
    if (rule.default_topk_method == "greedy" && groups.value_or(0) > 1) {
      json["topk_method"] = "group_limited_greedy";
    }
  }
  return json;
}

Result<std::int64_t> expert_width(const GgufMetadata& metadata,
                                  const GgufArchitecture& architecture, std::int64_t used) {
  MOESAIC_ASSIGN_OR_RETURN(const auto width,
                           metadata.integer("expert_feed_forward_length", 1, kMaxWidth));
  if (width) return *width;
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t whole,
                           metadata.required("feed_forward_length", 1, kMaxWidth));
  if (!architecture.divides_width) return whole;
  if (whole % used == 0) return whole / used;
  return metadata.bad(StatusCode::kInvalidArgument,
                      fmt::format("{}.feed_forward_length", metadata.architecture()),
                      fmt::format("got {}, need a multiple of expert_used_count {} as there is no "
                                  "expert_feed_forward_length",
                                  whole, used));
}

// How many shared experts of the routed width there are. Some writers state one of the two
// numbers, some both.
Result<std::int64_t> shared_count(const GgufMetadata& metadata, std::optional<std::int64_t> count,
                                  std::optional<std::int64_t> width, std::int64_t expert_width) {
  if (width.value_or(0) == 0) return count.value_or(0);
  if (count ? *count * expert_width == *width : *width % expert_width == 0) {
    return *width / expert_width;
  }
  return metadata.bad(
      StatusCode::kAmbiguousFormat,
      fmt::format("{}.expert_shared_feed_forward_length", metadata.architecture()),
      count ? fmt::format("got {}, need {}: {} times expert_feed_forward_length {}, as "
                          "expert_shared_count says",
                          *width, *count * expert_width, *count, expert_width)
            : fmt::format("got {}, need a multiple of expert_feed_forward_length {}", *width,
                          expert_width));
}

Status add_shared(const GgufMetadata& metadata, const GgufArchitecture& architecture,
                  const Family& family, std::int64_t expert_width, nlohmann::json* json) {
  if (family.shared == SharedRule::kNone) return {};
  MOESAIC_ASSIGN_OR_RETURN(const auto count, metadata.integer("expert_shared_count", 0, 1024));
  MOESAIC_ASSIGN_OR_RETURN(auto width,
                           metadata.integer("expert_shared_feed_forward_length", 0, kMaxWidth));
  if (family.shared == SharedRule::kCount) {
    MOESAIC_ASSIGN_OR_RETURN((*json)[std::string(family.shared_count_field)],
                             shared_count(metadata, count, width, expert_width));
    return {};
  }
  if (!width && architecture.divides_width) {
    MOESAIC_ASSIGN_OR_RETURN(width, metadata.integer("feed_forward_length", 1, kMaxWidth));
  }
  // Such a shared expert has a gate of its own, and so is always there.
  const bool needed = !family.shared_gate.empty() && family.shared_count_field.empty() &&
                      family.default_shared_width == 0;
  if (!width && needed) {
    MOESAIC_ASSIGN_OR_RETURN(width,
                             metadata.required("expert_shared_feed_forward_length", 1, kMaxWidth));
  }
  // Llama 4's shared expert has the routed ones' width in any case.
  if (!width && count && family.shared_width_field != family.width_fields.names[0]) {
    width = *count * expert_width;
  }
  // Where the family says "count times width", the file's width is that of the whole MLP.
  if (!family.shared_count_field.empty()) {
    nlohmann::json& stated = (*json)[std::string(family.shared_count_field)];
    if (width.value_or(0) > 0) stated = 1;  // else null: there is none
  }
  // Some families' configurations say 0 where there is none, others nothing.
  const bool says_none = family.shared_gate.empty() && family.shared_count_field.empty() &&
                         family.shared_width_field != family.width_fields.names[0];
  if (width.value_or(0) > 0 || says_none) {
    (*json)[std::string(family.shared_width_field)] = width.value_or(0);
  }
  return {};
}

// One MoE layer, whatever the family's rule for which layers are: the tensors decide that.
void add_layer_rule(const Family& family, nlohmann::json* json) {
  (*json)[std::string(family.num_layers_field)] = 1;
  switch (family.layer_rule) {
    case LayerRule::kEvery:
      return;
    case LayerRule::kSparseStep:
      (*json)["decoder_sparse_step"] = 1;
      return;
    case LayerRule::kFirstDense:
      if (family.has_layer_types) {
        (*json)["mlp_layer_types"] = {"sparse"};
      } else {
        (*json)[std::string(family.first_dense_fields.names[0])] = 0;
      }
      return;
    case LayerRule::kPeriod:
      (*json)["expert_layer_period"] = 1;
      (*json)["expert_layer_offset"] = 0;
      return;
    case LayerRule::kInterleave:
      (*json)["interleave_moe_layer_step"] = 1;
      return;
    case LayerRule::kInterval:
      (*json)["moe_layer_start_index"] = 0;
      (*json)["moe_layer_interval"] = 1;
      return;
    case LayerRule::kEnumerated:
      (*json)["moe_layers_enum"] = "0";
      return;
    case LayerRule::kListed:
      (*json)["moe_layer_freq"] = {1};
      return;
    case LayerRule::kPattern:
      (*json)["hybrid_override_pattern"] = "E";
      return;
  }
}

}  // namespace

Status check_gguf_routing(const GgufMetadata& metadata, const GgufArchitecture& architecture,
                          const Family& family) {
  MOESAIC_RETURN_IF_ERROR(check_gating(metadata, family));
  return check_fixed_routing(metadata, architecture, family);
}

Result<nlohmann::json> gguf_fields(const GgufMetadata& metadata,
                                   const GgufArchitecture& architecture, const Family& family,
                                   std::string_view model_type, std::int64_t num_experts) {
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t hidden,
                           metadata.required("embedding_length", 1, kMaxWidth));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t used,
                           metadata.required("expert_used_count", 1, num_experts));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t width, expert_width(metadata, architecture, used));
  MOESAIC_ASSIGN_OR_RETURN(nlohmann::json moe, routing_fields(metadata, family, architecture));
  MOESAIC_RETURN_IF_ERROR(add_shared(metadata, architecture, family, width, &moe));
  moe["num_experts"] = num_experts;
  moe["num_experts_per_tok"] = used;
  moe[std::string(family.width_fields.names[0])] = width;
  nlohmann::json json = nlohmann::json::object();
  if (family.moe_object.empty()) {
    json = std::move(moe);
  } else {
    moe["moe_normalize_expert_weights"] = 1;
    json[std::string(family.moe_object)] = std::move(moe);
  }
  json["model_type"] = model_type;
  json[std::string(family.hidden_field)] = hidden;
  if (!family.switch_field.empty()) json[std::string(family.switch_field)] = true;
  if (family.input_norm.present()) {
    constexpr std::string_view kEpsilon = "attention.layer_norm_rms_epsilon";
    MOESAIC_ASSIGN_OR_RETURN(const auto eps, metadata.number(kEpsilon));
    if (!eps) {
      return metadata.bad(StatusCode::kCorruptFile,
                          fmt::format("{}.{}", metadata.architecture(), kEpsilon),
                          "missing, need a number");
    }
    json[std::string(family.input_norm.eps_field)] = *eps;
  }
  add_layer_rule(family, &json);
  return json;
}

}  // namespace moesaic::checkpoint
