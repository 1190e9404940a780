// What resolve_layer settles from the names and dtypes that files have, in two steps.
#pragma once

#include <string_view>

#include "checkpoint/binding/layer_plan.h"
#include "checkpoint/config/config.h"
#include "checkpoint/container/shards.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

inline std::string_view name_of(const ShardSet::Located& tensor) { return tensor.info->name; }

// Prefix, layout of the experts and of the shared expert, spelling of optional tensors; spec and
// family of `source` are set. Errors as resolve_layer's.
Status choose_names(const ModelConfig& config, const ShardSet& shards, LayerSource* source);

// Formats, dtypes and the scheme that follows from them, after choose_names.
Status choose_numbers(const ModelConfig& config, const ShardSet& shards, LayerSource* source);

}  // namespace moesaic::checkpoint
