// Which layers of a model are MoE layers, from its configuration.
// Source: docs/spec/checkpoints.md section 3.3.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/families.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// The family's field, or, in families that spell out every layer, the length of that pattern.
Result<std::int64_t> read_num_layers(const ConfigFields& fields, const Family& family);

// One flag per layer. Errors name the field, as ConfigFields does.
Result<std::vector<bool>> moe_layers(const ConfigFields& fields, const Family& family,
                                     std::int64_t num_layers);

// Which of them route by token ids (Family::hash_table); all false for other families.
Result<std::vector<bool>> hash_layers(const ConfigFields& fields, const Family& family,
                                      std::int64_t num_layers);

}  // namespace moesaic::checkpoint
