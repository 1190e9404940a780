#include "checkpoint/config/gguf_layer_fields.h"

#include <fmt/format.h>

#include <string>

#include "core/fault.h"

namespace moesaic::checkpoint {

Result<GgufLayerFields> GgufLayerFields::read(const GgufMetadata& metadata,
                                              const GgufArchitecture& architecture,
                                              const Family& family, std::int64_t num_blocks) {
  GgufLayerFields fields(family);
  fields.states_limits_ = architecture.states_limits;
  if (architecture.states_limits) {
    MOESAIC_ASSIGN_OR_RETURN(fields.limits_, metadata.numbers("swiglu_clamp_exp", num_blocks));
    MOESAIC_ASSIGN_OR_RETURN(fields.shared_limits_,
                             metadata.numbers("swiglu_clamp_shexp", num_blocks));
  }
  if (!family.hash_table.empty()) {
    MOESAIC_ASSIGN_OR_RETURN(fields.hash_layers_,
                             metadata.required("hash_layer_count", 0, num_blocks));
    MOESAIC_ASSIGN_OR_RETURN(fields.vocabulary_, metadata.vocabulary());
  }
  return fields;
}

std::vector<double> GgufLayerFields::of(int layer) const {
  const auto at = [&](const std::vector<double>& list) {
    return list.empty() ? 0.0 : list[static_cast<std::size_t>(layer)];
  };
  return {at(limits_), at(shared_limits_), layer < hash_layers_ ? 1.0 : 0.0};
}

Status GgufLayerFields::add(const GgufMetadata& metadata, int layer, nlohmann::json* json) const {
  const std::vector<double> numbers = of(layer);
  const double limit = numbers[0], shared = numbers[1];
  if (!family_->hash_table.empty()) {
    (*json)["num_hash_layers"] = layer < hash_layers_ ? 1 : 0;
    (*json)["vocab_size"] = vocabulary_;
  }
  if (!states_limits_) return {};
  if (!family_->step_limits.empty()) {
    (*json)[std::string(family_->step_limits)] = limit;
    if (shared != 0) (*json)[std::string(family_->shared_step_limits)] = shared;
    return {};
  }
  const std::string key = fmt::format("{}.swiglu_clamp_exp", metadata.architecture());
  if (!(limit > 0)) {
    return metadata.bad(StatusCode::kUnsupported, key,
                        fmt::format("{} for layer {}, need a number > 0 for {} models",
                                    limits_.empty() ? "missing" : fmt::format("got {}", limit),
                                    layer, family_->title));
  }
  // Without a limit of its own the shared expert has the routed ones'.
  const double need = family_->shared_unlimited ? 0.0 : limit;
  if (!shared_limits_.empty() && shared != need && !MOESAIC_FAULT(gguf_ignore_shared_limits)) {
    return metadata.bad(StatusCode::kUnsupported,
                        fmt::format("{}.swiglu_clamp_shexp", metadata.architecture()),
                        fmt::format("got {} for layer {}, need {} for {} models", shared, layer,
                                    need, family_->title));
  }
  (*json)[std::string(family_->limit_field)] = limit;
  return {};
}

}  // namespace moesaic::checkpoint
