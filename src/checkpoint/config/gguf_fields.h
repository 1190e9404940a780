// The metadata of a GGUF file as the fields of a config.json of its family.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "checkpoint/config/families.h"
#include "checkpoint/config/gguf_architectures.h"
#include "checkpoint/config/gguf_metadata.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// What a family does not leave to the file: the file may say so, but nothing else.
Status check_gguf_routing(const GgufMetadata& metadata, const GgufArchitecture& architecture,
                          const Family& family);

// A configuration of one MoE layer, whatever the family's rule for which layers are.
Result<nlohmann::json> gguf_fields(const GgufMetadata& metadata,
                                   const GgufArchitecture& architecture, const Family& family,
                                   std::string_view model_type, std::int64_t num_experts);

}  // namespace moesaic::checkpoint
