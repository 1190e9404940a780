// The rebalancing algorithm: packing, replication, and their hierarchical combination.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <numeric>

#include "core/fault.h"
#include "core/refusal.h"
#include "moesaic/eplb.h"
#include "parallel/eplb_support.h"

namespace moesaic {
namespace eplb {
namespace {

using Ids = std::vector<std::int32_t>;
using Loads = std::vector<double>;

}  // namespace

Packing pack(std::span<const double> weights, std::int64_t bins) {
  const auto n = static_cast<std::int64_t>(weights.size());
  Packing p{Ids(weights.size()), Ids(weights.size(), 0)};
  if (n == bins) {
    std::iota(p.bin.begin(), p.bin.end(), 0);
    return p;
  }
  Ids order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return weights[at(a)] > weights[at(b)]; });
  const std::int64_t capacity = n / bins;
  Loads load(at(bins), 0.0);
  Ids used(at(bins), 0);
  // Bins with room as a heap, the lightest of them in front, of equals the first.
  const auto after = [&](std::int32_t a, std::int32_t b) {
    if (MOESAIC_FAULT(eplb_first_bin_with_room) || load[at(a)] == load[at(b)]) return a > b;
    return load[at(a)] > load[at(b)];
  };
  Ids open(at(bins));
  std::iota(open.begin(), open.end(), 0);
  for (const std::int32_t item : order) {
    std::pop_heap(open.begin(), open.end(), after);
    const std::int32_t lightest = open.back();
    p.bin[at(item)] = lightest;
    p.rank[at(item)] = used[at(lightest)]++;
    load[at(lightest)] += weights[at(item)];
    if (used[at(lightest)] < capacity) {
      std::push_heap(open.begin(), open.end(), after);
    } else {
      open.pop_back();
    }
  }
  return p;
}

Replication replicate(std::span<const double> weights, std::int64_t slots) {
  Replication r;
  r.count.assign(weights.size(), 1);
  r.physical_to_logical.resize(weights.size());
  std::iota(r.physical_to_logical.begin(), r.physical_to_logical.end(), 0);
  r.replica.assign(weights.size(), 0);
  // Experts as a heap, the one with most load a copy in front, of equals the first.
  const auto share = [&](std::int32_t e) {
    return MOESAIC_FAULT(eplb_replicate_by_total_load) ? weights[at(e)]
                                                       : weights[at(e)] / r.count[at(e)];
  };
  const auto after = [&](std::int32_t a, std::int32_t b) {
    return share(a) == share(b) ? a > b : share(a) < share(b);
  };
  Ids experts = r.physical_to_logical;
  std::make_heap(experts.begin(), experts.end(), after);
  while (static_cast<std::int64_t>(r.replica.size()) < slots) {
    std::pop_heap(experts.begin(), experts.end(), after);
    const std::int32_t most = experts.back();
    r.physical_to_logical.push_back(most);
    r.replica.push_back(r.count[at(most)]++);
    std::push_heap(experts.begin(), experts.end(), after);
  }
  return r;
}

}  // namespace eplb

namespace {

using eplb::at;
using eplb::Ids;
using eplb::Loads;
using eplb::pack;
using eplb::Packing;
using eplb::replicate;
using eplb::Replication;

constexpr std::int64_t kMaxSlots = std::int64_t{1} << 20;  // far above any model; bounds memory

Status check_weights(std::span<const double> weights) {
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (std::isfinite(weights[i]) && weights[i] >= 0) continue;
    return invalid(
        fmt::format("load: got {} for expert {}, need a finite number >= 0", weights[i], i));
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (!std::isfinite(sum)) return invalid("load: got loads whose sum is infinite");
  return {};
}

Status check_divides(const char* what, std::int64_t total, const char* by, std::int64_t parts) {
  if (parts >= 1 && total % parts == 0) return {};
  return invalid(fmt::format("{}: got {}, need a multiple of {} = {}", what, total, by, parts));
}

// The counts divide each other as the header demands.
Ids hierarchical(std::span<const double> load, std::int64_t slots, std::int64_t groups,
                 std::int64_t nodes, std::int64_t ranks) {
  const auto experts = static_cast<std::int64_t>(load.size());
  const std::int64_t group_size = experts / groups;
  Loads group_load(at(groups), 0.0);
  for (std::int64_t e = 0; e < experts; ++e) group_load[at(e / group_size)] += load[at(e)];
  const Packing on_node = pack(group_load, nodes);

  // Experts renumbered node by node: node, place of the group on it, place in the group.
  const std::int64_t per_node = experts / nodes;
  Ids original(at(experts));
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t g = e / group_size;
    original[at(on_node.bin[at(g)] * per_node + on_node.rank[at(g)] * group_size +
                e % group_size)] = static_cast<std::int32_t>(e);
  }
  const std::int64_t node_slots = slots / nodes;
  const std::int64_t rank_slots = slots / ranks;
  Ids result(at(slots));
  for (std::int64_t node = 0; node < nodes; ++node) {
    Loads mine(at(per_node));
    for (std::int64_t i = 0; i < per_node; ++i) {
      mine[at(i)] = load[at(original[at(node * per_node + i)])];
    }
    const Replication copies = replicate(mine, node_slots);
    Loads shares(at(node_slots));
    for (std::size_t s = 0; s < shares.size(); ++s) {
      const auto e = at(copies.physical_to_logical[s]);
      shares[s] = mine[e] / copies.count[e];
    }
    const Packing on_rank = pack(shares, ranks / nodes);
    for (std::int64_t s = 0; s < node_slots; ++s) {
      const std::int64_t place =
          node * node_slots + on_rank.bin[at(s)] * rank_slots + on_rank.rank[at(s)];
      result[at(place)] = original[at(node * per_node + copies.physical_to_logical[at(s)])];
    }
  }
  return result;
}

}  // namespace

Result<std::vector<std::int32_t>> rebalance_experts(std::span<const double> load,
                                                    const EplbShape& shape) {
  const auto experts = static_cast<std::int64_t>(load.size());
  if (shape.num_physical > kMaxSlots) {
    return Status(StatusCode::kLimitExceeded, fmt::format("num_physical: got {}, need at most {}",
                                                          shape.num_physical, kMaxSlots));
  }
  if (experts < 1 || shape.num_physical < experts) {
    return invalid(
        fmt::format("num_physical: got {}, need at least the {} experts (and at least "
                    "one)",
                    shape.num_physical, experts));
  }
  if (shape.num_nodes < 1 || shape.num_groups < 1) {
    return invalid(fmt::format("{}: got {}, need a number >= 1",
                               shape.num_nodes < 1 ? "num_nodes" : "num_groups",
                               std::min(shape.num_nodes, shape.num_groups)));
  }
  MOESAIC_RETURN_IF_ERROR(check_weights(load));
  MOESAIC_RETURN_IF_ERROR(
      check_divides("num_physical", shape.num_physical, "num_ranks", shape.num_ranks));
  const bool by_node = shape.num_groups % shape.num_nodes == 0;
  const int groups = by_node ? shape.num_groups : 1;
  const int nodes = by_node ? shape.num_nodes : 1;
  MOESAIC_RETURN_IF_ERROR(check_divides("num_experts", experts, "num_groups", groups));
  MOESAIC_RETURN_IF_ERROR(check_divides("num_ranks", shape.num_ranks, "num_nodes", nodes));
  try {
    return hierarchical(load, shape.num_physical, groups, nodes, shape.num_ranks);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "num_physical: cannot allocate the placement");
  }
}

}  // namespace moesaic
