// Expert load balancing inside the router: logical ids become physical ones, loads are counted.
// Source: docs/spec/routing.md section 8.
#pragma once

#include <cstdint>

#include "moesaic/router.h"
#include "moesaic/status.h"

namespace moesaic::router {

// kInvalidArgument unless all three views are present, have the sizes that num_experts and
// max_replicas prescribe, every count is in [1, max_replicas] and every used entry of the map names
// a physical expert below load.size().
Status check_eplb_state(const EplbState& state, std::int64_t num_experts);

// ids [num_tokens, slots] in place: position p = first_position + t * slots + j of logical expert e gets replica
// p mod replica_count[e]; an id outside [0, E) becomes -1. With record, load[physical] += 1 for
// every valid slot of a token that is not padding (`padding` may be null: none is).
// The state has passed check_eplb_state.
void map_logical_to_physical(const EplbState& state, std::int64_t num_experts,
                             std::int64_t num_tokens, std::int64_t slots,
                             const std::uint8_t* padding, std::int32_t* ids,
                             std::int64_t first_position = 0);

}  // namespace moesaic::router
