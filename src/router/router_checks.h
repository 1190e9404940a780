// What Router refuses, at creation and at each call. No routing here.
#pragma once

#include <string>

#include "moesaic/router.h"
#include "moesaic/status.h"

namespace moesaic::router {

// The routing in force: a grouping that cannot work becomes ungrouped top-k (logged), everything
// else is validated, including what only a router cares about.
Result<RoutingSpec> effective_routing(const RoutingSpec& spec);

// The parts besides the spec: bias, tables, functions, shared slots.
Status check_router_parts(const Router::Options& options, const RoutingSpec& spec);

// Shapes, dtypes, layout, presence and aliasing of a call's tensors. `vocab` is the number of rows
// of the hash table (0: no hashing); `vision_base` as in Options.
Status check_select_args(const Router::Args& args, const RoutingSpec& spec, std::int64_t slots,
                         std::int64_t vocab, std::int64_t vision_base);

// Whether the token skips the hash table: five ids from `base` on stand for pieces of an image.
inline bool is_vision_token(std::int64_t id, std::int64_t base) {
  return base > 0 && id >= base && id - base < 5;
}

std::string router_name(const RoutingSpec& spec, const std::string& simulation_strategy);

}  // namespace moesaic::router
