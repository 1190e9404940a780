// Fields of a configuration about experts and routing that nothing has read: some have no effect,
// the others were not understood. Source: the configuration classes of HF transformers, published
// configurations.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/families.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Whether this name refers to experts, routing or the experts' activation.
bool speaks_of_experts(std::string_view name);

// Checks every field of `object` that is not null: one that the family assumes
// (Family::assumed) must have the assumed value; one that is in no list, was not read and refers to
// experts is unknown. `where` begins every message. kUnsupported, or kAmbiguousFormat where
// implementations disagree about the value; names the field, the value found and the value needed.
Status check_unread_fields(const nlohmann::json& object, std::string_view where,
                           const Family& family, const FieldsRead& read);

}  // namespace moesaic::checkpoint
