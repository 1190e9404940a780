// Grouping of (token, slot) pairs by the local expert that computes them. A flat slot id is
// token * top_k + slot.
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/status.h"

namespace moesaic::permute {

// Stable counting sort of all slots by local expert.
//   topk_ids           [M*k]    in, global expert ids; -1: no expert
//   expert_map         [E]      in, global -> local or -1 (remote); empty: identity, then
//                               num_local_experts must equal num_experts
//   expert_first_slot  [E_l+1]  out, local expert e owns sorted_slots[first[e] .. first[e+1]);
//                               first[E_l] is the number of local slots
//   sorted_slots       [M*k]    out, flat slot ids by local expert, ascending inside an expert;
//                               slots with id -1 or a remote expert come last, ascending too
//   top_k              only to name token and slot in the text of an error; 0: flat index alone
// The outputs must not overlap the inputs. Returns kInvalidArgument (an id outside [-1, E), naming
// token, slot and value; a map entry outside [-1, E_l); negative sizes), kInvalidShape (a span of
// the wrong length) or kLimitExceeded (more than 2^31 - 1 slots); the outputs are then unspecified.
// Allocates nothing unless it fails. O(M*k + E_l). Deterministic.
Status sort_slots_by_expert(std::span<const std::int32_t> topk_ids,
                            std::span<const std::int32_t> expert_map, std::int64_t num_experts,
                            std::int64_t num_local_experts,
                            std::span<std::int64_t> expert_first_slot,
                            std::span<std::int32_t> sorted_slots, std::int64_t top_k = 0);

// Local expert of a global id: -1 when the id is -1 or the map (if not empty) sends it elsewhere.
// The id is inside [-1, E).
inline std::int32_t local_expert_of(std::int32_t id, std::span<const std::int32_t> expert_map) {
  if (id < 0) return -1;
  return expert_map.empty() ? id : expert_map[static_cast<std::size_t>(id)];
}

// The checks above that concern ids and map alone.
Status validate_topk_ids(std::span<const std::int32_t> topk_ids,
                         std::span<const std::int32_t> expert_map, std::int64_t num_experts,
                         std::int64_t num_local_experts, std::int64_t top_k);

}  // namespace moesaic::permute
