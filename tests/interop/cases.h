// Routings for the permutation tests: the worked example, and random ones with uneven loads.
#pragma once

#include <cstdint>
#include <vector>

#include "moesaic/interop/permute.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic::test {

using Ids = std::vector<std::int32_t>;

// M = 4, k = 2, E = 4.
inline Ids worked_ids() { return {2, 3, 0, 2, 2, 1, 3, 0}; }
inline Ids worked_map() { return {-1, -1, 0, 1}; }  // the rank that owns experts 2 and 3

struct RoutingCase {
  Ids ids, map;
  std::int64_t top_k = 1, num_experts = 1, num_local = 1;
  SlotRouting routing() const { return {ids, map, top_k, num_experts, num_local}; }
  // By definition, apart from the code under test.
  std::int32_t local(std::size_t slot) const {
    const std::int32_t id = ids[slot];
    return id < 0 ? -1 : (map.empty() ? id : map[static_cast<std::size_t>(id)]);
  }
};

// Random sizes; some experts popular, some never chosen; some ids -1; half the cases with a map
// that keeps part of the experts in a shuffled order.
inline RoutingCase random_case(Rng& rng) {
  RoutingCase c;
  c.num_experts = rng.integer(1, 40);
  c.top_k = rng.integer(1, std::min<std::int64_t>(c.num_experts, 8));
  const std::int64_t tokens = rng.integer(0, 60);
  for (std::int64_t s = 0; s < tokens * c.top_k; ++s) {
    const double u = rng.uniform();
    const auto id = static_cast<std::int32_t>(u * u * static_cast<double>(c.num_experts));
    c.ids.push_back(rng.integer(0, 19) == 0 ? -1 : id);
  }
  c.num_local = c.num_experts;
  if (rng.integer(0, 1) == 0) return c;
  std::vector<std::int32_t> kept;
  for (std::int32_t e = 0; e < c.num_experts; ++e) {
    if (rng.integer(0, 2) == 0) kept.push_back(e);
  }
  c.map.assign(static_cast<std::size_t>(c.num_experts), -1);
  c.num_local = static_cast<std::int64_t>(kept.size());
  for (std::int32_t local = 0; !kept.empty(); ++local) {
    const auto pick =
        static_cast<std::size_t>(rng.integer(0, static_cast<std::int64_t>(kept.size()) - 1));
    c.map[static_cast<std::size_t>(kept[pick])] = local;
    kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(pick));
  }
  return c;
}

}  // namespace moesaic::test
