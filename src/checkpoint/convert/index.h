// model.safetensors.index.json of a converted checkpoint.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "checkpoint/container/shards.h"
#include "checkpoint/convert/plan.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// Which file each tensor is in, and the bytes of all. kLimitExceeded, naming both figures, when it would
// be larger than what is read.
Result<std::string> converted_index(std::span<const PlannedShard> shards,
                                    std::size_t max_bytes = kMaxIndexBytes);

}  // namespace moesaic::checkpoint
