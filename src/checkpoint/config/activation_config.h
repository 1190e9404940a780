// The activation part of a model configuration. Source: docs/spec/checkpoints.md section 3.
#pragma once

#include <string_view>

#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/families.h"
#include "moesaic/activation.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// The family's activation with the constants and the kind that the fields say. kUnsupported for
// kinds and limits that the family does not define.
Result<ActivationSpec> read_activation(const ConfigFields& fields, const Family& family);

// A limit of one layer in a list of them: null and 0 say "none", and leave `activation` as it is.
Result<ActivationSpec> read_step_limit(const ConfigFields& fields, std::string_view field,
                                       ActivationSpec activation);

}  // namespace moesaic::checkpoint
