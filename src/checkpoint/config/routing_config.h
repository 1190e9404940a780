// The routing part of a model configuration. Source: docs/spec/checkpoints.md section 3.2,
// docs/spec/routing.md.
#pragma once

#include <cstdint>

#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/families.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Applies the family's rule to the fields. `bias_by_presence` becomes true when only the checkpoint
// can say whether there is a selection bias; the spec then says true.
Result<RoutingSpec> read_routing(const ConfigFields& fields, const Family& family,
                                 std::int64_t num_experts, bool* bias_by_presence);

}  // namespace moesaic::checkpoint
