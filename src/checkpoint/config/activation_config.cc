#include "checkpoint/config/activation_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "moesaic/activation.h"

namespace moesaic::checkpoint {
namespace {

// DBRX says {"name": "silu"} where others say "silu".
Result<std::optional<std::string>> activation_field(const ConfigFields& fields,
                                                    const Family& family) {
  if (family.moe_object.empty()) return fields.string(family.activation_field);
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* nested, fields.object(family.activation_field));
  if (nested == nullptr) return std::optional<std::string>();
  const std::string where = fmt::format("{}: {}", fields.where(), family.activation_field);
  for (const auto& [key, value] : nested->items()) {
    if (key == "name" || value.is_null()) continue;
    return Status(
        StatusCode::kUnsupported,
        fmt::format("{}: {}: got {}, need name alone: implementations ignore the rest", where,
                    quote_name(key), value.is_structured() ? value.type_name() : value.dump()));
  }
  return ConfigFields(*nested, where).string("name");
}

// Models whose experts have no gate: the names are pointwise functions.
Result<ActivationKind> plain_activation(const ConfigFields& fields, const Family& family) {
  MOESAIC_ASSIGN_OR_RETURN(const auto name, activation_field(fields, family));
  if (!name || *name == "relu2") return ActivationKind::kRelu2NoMul;
  if (*name == "silu") return ActivationKind::kSiluNoMul;
  if (*name == "gelu") return ActivationKind::kGeluNoMul;
  return Status(StatusCode::kUnsupported,
                fmt::format("{}: {}: got {}, need relu2, silu or gelu", fields.where(),
                            family.activation_field, quote_name(*name)));
}

Result<ActivationKind> hidden_activation(const ConfigFields& fields, const Family& family) {
  if (!is_gated(family.activation.kind)) return plain_activation(fields, family);
  MOESAIC_ASSIGN_OR_RETURN(const auto name, activation_field(fields, family));
  if (!name) return family.activation.kind;
  if (*name == "silu" || *name == "swish") return ActivationKind::kSilu;
  if (*name == "gelu_new")
    return ActivationKind::kGeluTanh;  // transformers' name for the tanh form
  Result<ActivationKind> kind = activation_from_name(*name);
  // A plain pointwise name would change the shape of w13; no family here is stored that way.
  if (kind.ok() && is_gated(*kind) && *kind != ActivationKind::kSitu) return *kind;
  return Status(StatusCode::kUnsupported,
                fmt::format("{}: {}: got {}, need silu, gelu or gelu_pytorch_tanh", fields.where(),
                            family.activation_field, quote_name(*name)));
}

// A constant of the activation, in the precision that it is computed with. What does not fit
// becomes infinite on the way, or 0, and is as meaningless as that.
Result<std::optional<float>> read_constant(const ConfigFields& fields, std::string_view name) {
  MOESAIC_ASSIGN_OR_RETURN(const auto stated, fields.number(name));
  if (!stated) return std::optional<float>();
  return std::optional(static_cast<float>(std::clamp(*stated, -1e30, 1e30)));
}

}  // namespace

Result<ActivationSpec> read_activation(const ConfigFields& fields, const Family& family) {
  ActivationSpec activation = family.activation;
  if (family.reads_hidden_act) {
    MOESAIC_ASSIGN_OR_RETURN(activation.kind, hidden_activation(fields, family));
    if (activation.kind == ActivationKind::kSwigluOai ||
        activation.kind == ActivationKind::kSwigluStep) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("{}: hidden_act: got {}, which {} models do not define",
                                fields.where(), activation_name(activation.kind), family.title));
    }
  }
  if (!family.limit_field.empty()) {
    if (std::isfinite(activation.limit)) {
      MOESAIC_RETURN_IF_ERROR(fields.refuse_null(std::span(&family.limit_field, 1), "a number",
                                                 "no limit", fmt::to_string(activation.limit)));
    }
    MOESAIC_ASSIGN_OR_RETURN(const auto limit, read_constant(fields, family.limit_field));
    if (limit && !(*limit > 0)) {
      return Status(fields.bad_value(family.limit_field, fmt::to_string(*limit), "> 0"));
    }
    if (limit && activation.kind != ActivationKind::kSilu &&
        activation.kind != ActivationKind::kSwigluOai) {
      return Status(StatusCode::kUnsupported,
                    fmt::format("{}: {}: got {} with activation {}, need silu", fields.where(),
                                family.limit_field, *limit, activation_name(activation.kind)));
    }
    if (limit) activation.limit = *limit;
  }
  for (const auto& [field, constant] : {std::pair{family.beta_field, &activation.beta},
                                        std::pair{family.up_limit_field, &activation.up_limit}}) {
    if (field.empty()) continue;
    MOESAIC_ASSIGN_OR_RETURN(const auto stated, read_constant(fields, field));
    if (stated && !(*stated > 0)) {
      return Status(fields.bad_value(field, fmt::to_string(*stated), "> 0"));
    }
    if (stated) *constant = *stated;
  }
  if (!family.alpha_field.empty()) {
    MOESAIC_ASSIGN_OR_RETURN(const auto alpha, read_constant(fields, family.alpha_field));
    if (alpha && !MOESAIC_FAULT(checkpoint_alpha_ignored)) activation.alpha = *alpha;
  }
  if (std::isfinite(activation.limit) && activation.kind != ActivationKind::kSilu &&
      activation.kind != ActivationKind::kSwigluOai) {
    return fields.unsupported(fmt::format("{}: got {} with the family's swiglu_limit {}, need silu",
                                          family.activation_field, activation_name(activation.kind),
                                          activation.limit));
  }
  return activation;
}

Result<ActivationSpec> read_step_limit(const ConfigFields& fields, std::string_view field,
                                       ActivationSpec activation) {
  MOESAIC_ASSIGN_OR_RETURN(const auto limit, fields.number(field));
  if (!limit || *limit == 0 || MOESAIC_FAULT(checkpoint_ignore_step_limits)) return activation;
  const auto narrow = static_cast<float>(std::clamp(*limit, -1e30, 1e30));
  if (!(narrow > 0)) return fields.bad_value(field, fmt::to_string(*limit), ">= 0 or null");
  activation.kind = ActivationKind::kSwigluStep;
  activation.limit = narrow;
  return activation;
}

}  // namespace moesaic::checkpoint
