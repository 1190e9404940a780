// Maps of experts that a caller balances with: what must hold before they come into force.
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "core/refusal.h"
#include "layer/expert_balancer.h"
#include "router/eplb_map.h"

namespace moesaic::layer {
namespace {

Status check_slots(std::span<const std::int32_t> slots, const SlotShape& shape) {
  if (std::ssize(slots) != shape.num_physical) {
    return invalid(
        fmt::format("physical_to_logical: got {} slots, need {} (the experts and redundant ones of "
                    "this layer)",
                    slots.size(), shape.num_physical));
  }
  for (std::size_t p = 0; p < slots.size(); ++p) {
    if (slots[p] >= 0 && slots[p] < shape.num_logical) continue;
    return invalid(fmt::format("physical_to_logical[{}]: got {}, need 0 to {} (experts - 1)", p,
                               slots[p], shape.num_logical - 1));
  }
  return {};
}

// Every slot that the maps use is used once, and holds the expert that they look for in it.
Status check_against_slots(const EplbState& state, std::span<const std::int32_t> slots,
                           std::int64_t num_logical) {
  std::vector<bool> used(slots.size(), false);
  for (std::int64_t e = 0; e < num_logical; ++e) {
    for (std::int64_t r = 0; r < state.replica_count[static_cast<std::size_t>(e)]; ++r) {
      const std::int32_t slot =
          state.logical_to_physical[static_cast<std::size_t>(e * state.max_replicas + r)];
      const auto at = static_cast<std::size_t>(slot);
      if (slots[at] != e && !MOESAIC_FAULT(eplb_takes_stale_maps)) {
        const auto held = std::find(slots.begin(), slots.end(), static_cast<std::int32_t>(e));
        return invalid(fmt::format(
            "eplb.logical_to_physical[{}, {}]: got slot {}, which holds expert {}; need one that "
            "holds expert {} ({})",
            e, r, slot, slots[at], e,
            held == slots.end() ? std::string("there is none")
                                : fmt::format("the first is {}", held - slots.begin())));
      }
      if (used[at] && !MOESAIC_FAULT(eplb_takes_slots_twice)) {
        return invalid(fmt::format(
            "eplb.logical_to_physical[{}, {}]: got slot {} a second time, need each slot once", e,
            r, slot));
      }
      used[at] = true;
    }
  }
  return {};
}

}  // namespace

Result<ExpertMaps> ExpertBalancer::check_state(
    const EplbState& state, std::span<const std::int32_t> physical_to_logical) const {
  if (flight_) {
    return Status(invalid("eplb: a rearrangement is in flight, need to continue it to its end"));
  }
  if (!state.load.empty() && std::ssize(state.load) != shape_.num_physical) {
    return Status(invalid(fmt::format("eplb.load: got {} counters, need {} (one per slot) or none",
                                      state.load.size(), shape_.num_physical)));
  }
  const std::span<const std::int32_t> slots =
      physical_to_logical.empty() ? this->physical_to_logical() : physical_to_logical;
  MOESAIC_RETURN_IF_ERROR(check_slots(slots, shape_));
  try {
    std::vector<std::int32_t> counters(slots.size());
    EplbState counted = state;  // whose check wants counters, and knows the slots by them
    counted.load = counters;
    MOESAIC_RETURN_IF_ERROR(router::check_eplb_state(counted, shape_.num_logical));
    MOESAIC_RETURN_IF_ERROR(check_against_slots(state, slots, shape_.num_logical));
    ExpertMaps maps;
    maps.physical_to_logical.assign(slots.begin(), slots.end());
    maps.logical_to_physical.assign(state.logical_to_physical.begin(),
                                    state.logical_to_physical.end());
    maps.replica_count.assign(state.replica_count.begin(), state.replica_count.end());
    maps.max_replicas = state.max_replicas;
    return maps;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "eplb: cannot allocate the maps");
  }
}

Status ExpertBalancer::set_state(ExpertMaps maps, const EplbState& state) {
  if (memory_) {
    // What was counted so far belongs to the counters of before.
    MOESAIC_RETURN_IF_ERROR(update_view());
    MOESAIC_RETURN_IF_ERROR(memory_->total_load(seen_));
    MOESAIC_RETURN_IF_ERROR(memory_->set_maps(maps));
    MOESAIC_RETURN_IF_ERROR(memory_->set_recording(state.record));
  }
  maps_ = std::move(maps);
  load_view_ = state.load;
  record_ = state.record;
  return {};
}

}  // namespace moesaic::layer
