#include "checkpoint/config/unread_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// In any family: training (losses, noise, capacity while training), reports, and how somebody's
// engine spreads or batches the work. A name that means something else in one family is not here.
constexpr auto kWithoutEffect = std::to_array<std::string_view>({
    "output_router_logits",
    "router_aux_loss_coef",
    "router_aux_loss_coeff",
    "router_z_loss_coef",
    "router_jitter_noise",  // read where it is part of the routing (Phi-3.5)
    "input_jitter_noise",
    "moe_jitter_eps",
    "moe_loss_weight",
    "moe_aux_loss_coeff",
    "moe_aux_loss_coef",
    "moe_aux_loss_lambda",
    "moe_z_loss_coeff",
    "moe_z_loss_lambda",
    "moe_orthogonal_loss_lambda",
    "moe_dropout_prob",
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "moe_router_dtype",  // scores are F32 whatever it says
    "router_dtype",
    "moe_token_dispatcher_type",
    "moe_permute_fusion",
    "moe_grouped_gemm",
    "moe_shared_expert_overlap",
    "moe_implementation",
    "moe_impl",
    "moe_backend",
    "moe_group",
    "moe_fuse_experts",
    "experts_implementation",
    "expert_parallel_size",
    // Sizes: the shapes of the tensors have the last word.
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "top_k",  // of text generation, in files that spell all defaults out
    "mtp_mlp_layer_types",
});

// Spellings of the activation that some family reads.
constexpr auto kActivationNames = std::to_array<std::string_view>(
    {"hidden_act", "hidden_activation", "activation_function", "ffn_act_fn"});

// A value in a message: numbers and short texts in full, containers by kind.
std::string describe_value(const nlohmann::json& value) {
  if (value.is_string()) return quote_name(value.get_ref<const std::string&>());
  if (value.is_object()) return "an object";
  if (value.is_array() && !value.empty()) return fmt::format("a list of {}", value.size());
  return value.dump();
}

bool is_one_of(const nlohmann::json& value, std::string_view alternatives) {
  while (true) {
    const std::size_t bar = alternatives.find('|');
    const std::string_view text = alternatives.substr(0, bar);
    if (nlohmann::json::parse(text.begin(), text.end(), nullptr, false) == value) return true;
    if (bar == std::string_view::npos) return false;
    alternatives.remove_prefix(bar + 1);
  }
}

Status check_assumed(const AssumedField& field, const nlohmann::json& value, std::string_view where,
                     const Family& family) {
  if (field.value.empty() || is_one_of(value, field.value)) return {};
  if (MOESAIC_FAULT(checkpoint_accept_other_constants)) return {};
  std::string need(field.value);
  for (std::size_t bar = need.find('|'); bar != std::string::npos; bar = need.find('|')) {
    need.replace(bar, 1, " or ");
  }
  if (!field.readings.empty()) {
    return {
        StatusCode::kAmbiguousFormat,
        fmt::format("{}: {}: got {}, need {} in {} models, since implementations disagree: {}",
                    where, field.name, describe_value(value), need, family.title, field.readings)};
  }
  return {StatusCode::kUnsupported,
          fmt::format("{}: {}: got {}, need {}, the value that {} models are computed with", where,
                      field.name, describe_value(value), need, family.title)};
}

// What follows from the family's rules about the usual names, for families that do not read them.
std::vector<AssumedField> implied_fields(const Family& family) {
  std::vector<AssumedField> fields = {{"mlp_bias", "false"}};
  const RoutingRule& rule = family.routing;
  if (rule.method == RoutingMethod::kTopK) {
    if (rule.renorm != RenormRule::kStated) {
      const bool never = rule.renorm == RenormRule::kNever;
      fields.push_back({"norm_topk_prob", never ? "false" : "true"});
    }
    switch (rule.scoring_func) {
      case ScoringFunc::kSoftmax:
        fields.push_back({"scoring_func", "\"softmax\""});
        break;
      case ScoringFunc::kSigmoid:
        fields.push_back({"scoring_func", "\"sigmoid\""});
        break;
      case ScoringFunc::kSqrtSoftplus:
        fields.push_back({"scoring_func", "\"sqrtsoftplus\""});
        break;
    }
  }
  fields.push_back({"routed_scaling_factor", "1"});
  fields.push_back({"n_group", "1"});
  fields.push_back({"topk_group", "1"});
  if (family.shared == SharedRule::kNone) {
    for (const std::string_view name :
         {"n_shared_experts", "num_shared_experts", "shared_intermediate_size",
          "shared_expert_intermediate_size"}) {
      fields.push_back({name, "0"});
    }
  }
  return fields;
}

template <typename List>
bool holds(const List& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

}  // namespace

bool speaks_of_experts(std::string_view name) {
  // The index_* fields belong to the indexer of sparse attention ("index_topk").
  if (name.starts_with("index_")) return false;
  std::string low(name);
  for (char& c : low) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const std::string_view part : {"moe", "expert", "rout", "swiglu", "topk", "top_k", "scoring",
                                      "score_func", "shared_intermediate", "shared_mlp"}) {
    if (low.find(part) != std::string::npos) return true;
  }
  return low == "n_group" || low == "mlp_layer_types" || holds(kActivationNames, low);
}

Status check_unread_fields(const nlohmann::json& object, std::string_view where,
                           const Family& family, const FieldsRead& read) {
  std::vector<AssumedField> assumed(family.assumed.list().begin(), family.assumed.list().end());
  for (const AssumedField& field : implied_fields(family)) {
    if (!read.contains(field.name)) assumed.push_back(field);
  }
  const std::span<const std::string_view> layers = layer_rule_fields(family.layer_rule);
  for (const auto& item : object.items()) {
    const std::string& name = item.key();
    const nlohmann::json& value = item.value();
    // null says that there is no such thing; a user who knows that a field has no effect sets that.
    if (value.is_null()) continue;
    const auto field = std::find_if(assumed.begin(), assumed.end(),
                                    [&](const AssumedField& a) { return a.name == name; });
    if (field != assumed.end()) {
      MOESAIC_RETURN_IF_ERROR(check_assumed(*field, value, where, family));
      continue;
    }
    if (read.contains(name) || !speaks_of_experts(name) || holds(kWithoutEffect, name) ||
        holds(layers, name) || name == family.moe_object) {
      continue;
    }
    if (MOESAIC_FAULT(checkpoint_accept_unknown_fields)) continue;
    return {StatusCode::kUnsupported,
            fmt::format("{}: {}: got {}, but {} models have no such field that this version knows, "
                        "and its name speaks of experts or routing; need null or no such field",
                        where, quote_name(name), describe_value(value), family.title)};
  }
  return {};
}

}  // namespace moesaic::checkpoint
