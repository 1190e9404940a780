// The experts of a rank without a list of them.
#pragma once

#include <cstdint>

#include "moesaic/parallel.h"
#include "moesaic/status.h"

namespace moesaic {

// first, first + step, ...: `count` ids.
struct ExpertShare {
  std::int64_t first = 0, step = 1, count = 0;
};

// What local_expert_ids lists, with its errors but kOutOfMemory.
Result<ExpertShare> expert_share(std::int64_t num_experts, const ParallelConfig& config);

}  // namespace moesaic
