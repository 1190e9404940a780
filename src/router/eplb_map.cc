#include "router/eplb_map.h"

#include <fmt/format.h>

#include <limits>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"

namespace moesaic::router {
Status check_eplb_state(const EplbState& state, std::int64_t num_experts) {
  const auto entries = checked_mul(num_experts, state.max_replicas);
  if (state.max_replicas < 1 || !entries) {
    return invalid(fmt::format("eplb.max_replicas: got {}, need at least 1", state.max_replicas));
  }
  if (state.logical_to_physical.size() != static_cast<std::size_t>(*entries)) {
    return invalid(fmt::format("eplb.logical_to_physical: got {} entries, need {} ([{}, {}])",
                               state.logical_to_physical.size(), *entries, num_experts,
                               state.max_replicas));
  }
  if (state.replica_count.size() != static_cast<std::size_t>(num_experts)) {
    return invalid(fmt::format("eplb.replica_count: got {} entries, need {}",
                               state.replica_count.size(), num_experts));
  }
  if (state.load.empty()) {
    return invalid("eplb.load: absent, need one counter per physical expert");
  }
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const std::int32_t count = state.replica_count[static_cast<std::size_t>(e)];
    if (count < 1 || count > state.max_replicas) {
      return invalid(fmt::format("eplb.replica_count[{}]: got {}, need 1 to max_replicas {}", e,
                                 count, state.max_replicas));
    }
    for (std::int64_t r = 0; r < count; ++r) {
      const std::int32_t physical =
          state.logical_to_physical[static_cast<std::size_t>(e * state.max_replicas + r)];
      if (physical < 0 || static_cast<std::size_t>(physical) >= state.load.size()) {
        return invalid(
            fmt::format("eplb.logical_to_physical[{}, {}]: got {}, need 0 to {} (physical "
                        "experts - 1)",
                        e, r, physical, state.load.size() - 1));
      }
    }
  }
  return {};
}

void map_logical_to_physical(const EplbState& state, std::int64_t num_experts,
                             std::int64_t num_tokens, std::int64_t slots,
                             const std::uint8_t* padding, std::int32_t* ids,
                             std::int64_t first_position) {
  const std::int64_t shift = MOESAIC_FAULT(router_eplb_replica_off_by_one) ? 1 : 0;
  const bool count_padding = MOESAIC_FAULT(router_eplb_count_padding);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const bool counted = state.record && (padding == nullptr || padding[t] == 0 || count_padding);
    for (std::int64_t j = 0; j < slots; ++j) {
      const std::int64_t position = t * slots + j;
      const std::int64_t logical = ids[position];
      if (logical < 0 || logical >= num_experts) {
        ids[position] = -1;
        continue;
      }
      // Round robin over the flattened position: the same on every rank, and stateless.
      const std::int64_t replica = (first_position + position + shift) %
                                   state.replica_count[static_cast<std::size_t>(logical)];
      const std::int32_t physical = state.logical_to_physical[static_cast<std::size_t>(
          logical * state.max_replicas + replica)];
      ids[position] = physical;
      std::int32_t& load = state.load[static_cast<std::size_t>(physical)];
      if (counted && load < std::numeric_limits<std::int32_t>::max()) ++load;
    }
  }
}

}  // namespace moesaic::router
