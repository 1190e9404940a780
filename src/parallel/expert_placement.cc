// Ownership of experts by expert-parallel ranks. One rule (expert_share) decides; the map is its
// inverse, so the two cannot disagree.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <new>

#include "core/fault.h"
#include "moesaic/parallel.h"
#include "parallel/expert_share.h"

namespace moesaic {

Result<ExpertShare> expert_share(std::int64_t num_experts, const ParallelConfig& config) {
  MOESAIC_RETURN_IF_ERROR(config.validate());
  if (num_experts < 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("num_experts: got {}, need a number >= 0", num_experts));
  }
  if (num_experts > std::numeric_limits<std::int32_t>::max()) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("num_experts: got {}, need at most 2^31-1", num_experts));
  }
  const std::int64_t ep = config.ep_size;
  const std::int64_t rank = config.ep_rank;
  const std::int64_t base = num_experts / ep;
  const std::int64_t remainder = num_experts % ep;
  const bool extra_to_last = MOESAIC_FAULT(parallel_extra_expert_to_last_rank);
  // The first `remainder` ranks own one expert more.
  const bool one_more = extra_to_last ? rank >= ep - remainder : rank < remainder;
  const std::int64_t count = base + (one_more ? 1 : 0);

  std::int64_t first = rank * base + std::min(rank, remainder);
  std::int64_t step = 1;
  if (extra_to_last) first = rank * base + std::max<std::int64_t>(0, rank - (ep - remainder));
  if (config.placement == ExpertPlacement::kRoundRobin &&
      !MOESAIC_FAULT(parallel_ignore_round_robin)) {
    first = rank;
    step = ep;
  }
  return ExpertShare{first, step, count};
}

Result<std::vector<std::int64_t>> local_expert_ids(std::int64_t num_experts,
                                                   const ParallelConfig& config) {
  MOESAIC_ASSIGN_OR_RETURN(const ExpertShare share, expert_share(num_experts, config));
  try {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(share.count));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = share.first + share.step * static_cast<std::int64_t>(i);
    }
    return ids;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("num_experts: cannot allocate the ids of {} experts", share.count));
  }
}

Result<std::vector<std::int32_t>> make_expert_map(std::int64_t num_experts,
                                                  const ParallelConfig& config) {
  MOESAIC_ASSIGN_OR_RETURN(const ExpertShare share, expert_share(num_experts, config));
  if (config.ep_size == 1) return std::vector<std::int32_t>{};
  try {
    std::vector<std::int32_t> map(static_cast<std::size_t>(num_experts), -1);
    for (std::int64_t i = 0; i < share.count; ++i) {
      map[static_cast<std::size_t>(share.first + share.step * i)] = static_cast<std::int32_t>(i);
    }
    return map;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("num_experts: cannot allocate a map of {} entries", num_experts));
  }
}

Result<std::vector<std::int32_t>> expert_owners(std::int64_t num_experts,
                                                const ParallelConfig& config) {
  MOESAIC_RETURN_IF_ERROR(config.validate());
  std::vector<std::int32_t> owners;
  ParallelConfig other = config;
  for (other.ep_rank = 0; other.ep_rank < config.ep_size; ++other.ep_rank) {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertShare share, expert_share(num_experts, other));
    try {
      owners.resize(static_cast<std::size_t>(num_experts), 0);
    } catch (const std::bad_alloc&) {
      return Status(StatusCode::kOutOfMemory, "num_experts: cannot allocate the owners");
    }
    for (std::int64_t i = 0; i < share.count; ++i) {
      owners[static_cast<std::size_t>(share.first + share.step * i)] = other.ep_rank;
    }
  }
  return owners;
}

}  // namespace moesaic
