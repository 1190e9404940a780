// Ownership of experts in the forms that other engines ask for. Who owns what is decided by
// local_expert_ids (parallel.h).
#include <fmt/format.h>

#include <cstddef>
#include <limits>
#include <new>

#include "moesaic/interop/parallel.h"
#include "moesaic/log.h"

namespace moesaic {

Result<MaskedExpertMap> make_masked_expert_map(std::int64_t num_experts,
                                               const ParallelConfig& config,
                                               std::int64_t fused_shared) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> ids,
                           local_expert_ids(num_experts, config));
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (fused_shared < 0 || fused_shared >= kMost - num_experts) {
    return Status(StatusCode::kInvalidArgument, fmt::format("fused_shared: got {}, need 0 .. {}",
                                                            fused_shared, kMost - num_experts - 1));
  }
  try {
    MaskedExpertMap m;
    const auto total = static_cast<std::size_t>(num_experts + fused_shared);
    m.map.assign(total, -1);
    m.mask.assign(total + 1, 0);
    std::int32_t local = 0;
    const auto own = [&](std::int64_t id) {
      m.map[static_cast<std::size_t>(id)] = local++;
      m.mask[static_cast<std::size_t>(id)] = 1;
    };
    for (const std::int64_t id : ids) own(id);
    for (std::int64_t i = 0; i < fused_shared; ++i) own(num_experts + i);
    return m;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "num_experts: cannot allocate the masked map");
  }
}

Result<ExpertOwnership> update_expert_map(std::int64_t num_experts, const ParallelConfig& config,
                                          int new_ep_size, int new_ep_rank) {
  MOESAIC_RETURN_IF_ERROR(config.validate());
  ExpertOwnership o;
  o.config = config;
  // Without tensor parallelism inside the engine every rank is a dp rank, and stays one.
  if (config.dp_size == config.ep_size) {
    o.config.dp_size = new_ep_size;
    o.config.dp_rank = new_ep_rank;
  }
  o.config.ep_size = new_ep_size;
  o.config.ep_rank = new_ep_rank;
  // Ranks whose rows are parts of a sequence keep such rows: all of a new engine's.
  const bool divides = new_ep_size > 0 && o.config.dp_size > 0 && o.config.pcp_size > 0 &&
                       o.config.flat_size() % (o.config.dp_size * o.config.pcp_size) == 0;
  if (config.sp_size > 1 && divides) o.config.sp_size = o.config.engine_tp_size();
  MOESAIC_RETURN_IF_ERROR(o.config.validate());
  // Ranks of one dp rank are neighbours.
  o.config.dp_rank = o.config.flat_rank() / (o.config.flat_size() / o.config.dp_size);
  MOESAIC_ASSIGN_OR_RETURN(o.local_ids, local_expert_ids(num_experts, o.config));
  MOESAIC_ASSIGN_OR_RETURN(o.expert_map, make_expert_map(num_experts, o.config));
  return o;
}

Result<ExpertPlacement> resolve_placement(ExpertPlacement wanted, std::int64_t num_experts,
                                          int ep_size, const PlacementFacts& facts) {
  if (ep_size < 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("ep_size: got {}, need a number >= 1", ep_size));
  }
  if (facts.enable_eplb && num_experts % ep_size != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("num_experts: got {} with expert load balancing, need a multiple of "
                              "ep_size {}",
                              num_experts, ep_size));
  }
  if (!facts.enable_eplb && facts.num_redundant_experts != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("num_redundant_experts: got {} without expert load balancing, need 0",
                              facts.num_redundant_experts));
  }
  if (wanted != ExpertPlacement::kRoundRobin) return wanted;
  const char* why = nullptr;
  if (facts.num_expert_group <= 1) {
    why = "the router has no expert groups";
  } else if (facts.enable_eplb) {
    why = "expert load balancing decides the placement";
  } else if (ep_size == 1) {
    why = "there is one rank";
  } else if (facts.all_to_all && !facts.takes_routing_tables) {
    why = "the all-to-all transport takes no routing tables";
  }
  if (why == nullptr) return wanted;
  log_warning_once(fmt::format("expert placement: round_robin becomes linear: {}", why));
  return ExpertPlacement::kLinear;
}

Result<RoutingTables> make_routing_tables(std::int64_t num_experts, const ParallelConfig& config) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> mine,
                           local_expert_ids(num_experts, config));
  try {
    RoutingTables t;
    const auto total = static_cast<std::size_t>(num_experts);
    t.global_to_physical.resize(total);
    t.physical_to_global.reserve(total);
    ParallelConfig other = config;
    for (other.ep_rank = 0; other.ep_rank < config.ep_size; ++other.ep_rank) {
      MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> ids,
                               local_expert_ids(num_experts, other));
      for (const std::int64_t id : ids) {
        t.global_to_physical[static_cast<std::size_t>(id)] =
            static_cast<std::int32_t>(t.physical_to_global.size());
        t.physical_to_global.push_back(static_cast<std::int32_t>(id));
      }
    }
    for (const std::int64_t id : mine) t.local_to_global.push_back(static_cast<std::int32_t>(id));
    return t;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "num_experts: cannot allocate routing tables");
  }
}

}  // namespace moesaic
