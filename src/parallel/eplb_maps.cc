// Maps between logical and physical experts, and what changes from one to the next.
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
namespace {

using eplb::at;

using Ids = std::vector<std::int32_t>;

Status no_memory() { return {StatusCode::kOutOfMemory, "cannot allocate expert maps"}; }

Status check_pair(std::span<const std::int32_t> current, std::span<const std::int32_t> wanted,
                  int num_ranks) {
  if (current.size() != wanted.size()) {
    return invalid(
        fmt::format("wanted: got {} slots, the current map has {}", wanted.size(), current.size()));
  }
  if (num_ranks < 1 || current.size() % at(num_ranks) != 0) {
    return invalid(
        fmt::format("num_ranks: got {}, need a divisor of {} slots", num_ranks, current.size()));
  }
  return {};
}

// Slots of each expert, at least one.
Result<Ids> count_replicas(std::span<const std::int32_t> physical_to_logical,
                           std::int64_t num_logical) {
  if (num_logical < 1 || num_logical >= std::int64_t{1} << 31) {
    return invalid(fmt::format("num_logical: got {}, need 1 .. 2^31-1", num_logical));
  }
  Ids counts(at(num_logical), 0);
  for (std::size_t s = 0; s < physical_to_logical.size(); ++s) {
    const std::int32_t e = physical_to_logical[s];
    if (e < 0 || e >= num_logical) {
      return invalid(fmt::format("physical_to_logical: got {} in slot {}, need 0 .. {}", e, s,
                                 num_logical - 1));
    }
    ++counts[at(e)];
  }
  for (std::int64_t e = 0; e < num_logical; ++e) {
    if (counts[at(e)] > 0) continue;
    return invalid(fmt::format("physical_to_logical: expert {} has no slot, need one", e));
  }
  return counts;
}

// Ranks holding each expert, in order of first appearance. Entries of -1 are skipped.
std::vector<Ids> holders(std::span<const std::int32_t> map, std::int64_t per_rank,
                         std::int32_t experts) {
  std::vector<Ids> ranks(at(experts));
  for (std::size_t s = 0; s < map.size(); ++s) {
    if (map[s] < 0) continue;
    const auto rank = static_cast<std::int32_t>(static_cast<std::int64_t>(s) / per_rank);
    Ids& list = ranks[at(map[s])];
    if (list.empty() || list.back() != rank) list.push_back(rank);
  }
  return ranks;
}

}  // namespace

Result<std::vector<std::int32_t>> initial_physical_to_logical(std::int64_t num_logical,
                                                              std::int64_t num_physical) {
  if (num_logical < 1 || num_physical < num_logical || num_physical >= std::int64_t{1} << 31) {
    return invalid(
        fmt::format("num_physical: got {} for {} experts, need at least as many and one, up to "
                    "2^31-1",
                    num_physical, num_logical));
  }
  try {
    Ids map(at(num_physical));
    for (std::int64_t s = 0; s < num_physical; ++s) {
      map[at(s)] = static_cast<std::int32_t>(s % num_logical);
    }
    return map;
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

Result<ExpertMaps> make_expert_maps(std::span<const std::int32_t> physical_to_logical,
                                    std::int64_t num_logical) {
  try {
    ExpertMaps m;
    MOESAIC_ASSIGN_OR_RETURN(m.replica_count, count_replicas(physical_to_logical, num_logical));
    m.physical_to_logical.assign(physical_to_logical.begin(), physical_to_logical.end());
    m.max_replicas = *std::max_element(m.replica_count.begin(), m.replica_count.end());
    m.logical_to_physical.assign(at(num_logical * m.max_replicas), -1);
    Ids next(at(num_logical), 0);
    for (std::size_t s = 0; s < physical_to_logical.size(); ++s) {
      const std::int32_t e = physical_to_logical[s];
      m.logical_to_physical[at(e * m.max_replicas + next[at(e)]++)] = static_cast<std::int32_t>(s);
    }
    return m;
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

Result<std::vector<std::int32_t>> preserve_slots(std::span<const std::int32_t> current,
                                                 std::span<const std::int32_t> wanted,
                                                 int num_ranks) {
  MOESAIC_RETURN_IF_ERROR(check_pair(current, wanted, num_ranks));
  const std::size_t n = current.size() / at(num_ranks);
  try {
    Ids result(wanted.begin(), wanted.end());
    for (std::size_t first = 0; first < current.size(); first += n) {
      std::vector<bool> used(n, false);  // entries of wanted that have their slot
      std::vector<bool> kept(n, false);  // slots that keep their expert
      for (std::size_t s = 0; s < n; ++s) {
        for (std::size_t i = 0; i < n; ++i) {
          if (used[i] || wanted[first + i] != current[first + s]) continue;
          used[i] = kept[s] = true;
          result[first + s] = current[first + s];
          break;
        }
      }
      std::size_t i = 0;
      for (std::size_t s = 0; s < n; ++s) {
        if (kept[s]) continue;
        while (used[i]) ++i;
        result[first + s] = wanted[first + i++];
      }
    }
    return result;
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

Result<std::vector<ExpertTransfer>> plan_transfers(std::span<const std::int32_t> current,
                                                   std::span<const std::int32_t> wanted,
                                                   int num_ranks) {
  MOESAIC_RETURN_IF_ERROR(check_pair(current, wanted, num_ranks));
  const auto per_rank = static_cast<std::int64_t>(current.size()) / num_ranks;
  std::int32_t experts = 0;
  for (const auto map : {current, wanted}) {
    for (const std::int32_t e : map) {
      if (e >= 1 << 24) return invalid(fmt::format("expert: got {}, need below 2^24", e));
      experts = std::max(experts, e + 1);
    }
  }
  try {
    const std::vector<Ids> before = holders(current, per_rank, experts);
    const std::vector<Ids> after = holders(wanted, per_rank, experts);
    std::vector<ExpertTransfer> plan;
    for (std::int32_t e = 0; e < experts; ++e) {
      const Ids& senders = before[at(e)];
      Ids receivers;
      for (const std::int32_t rank : after[at(e)]) {
        if (std::find(senders.begin(), senders.end(), rank) == senders.end()) {
          receivers.push_back(rank);
        }
      }
      if (receivers.empty()) continue;
      if (senders.empty()) {
        return invalid(fmt::format("current: expert {} is wanted but nobody holds it", e));
      }
      const std::size_t each = receivers.size() / senders.size();
      for (std::size_t i = 0; i < senders.size(); ++i) {
        for (std::size_t j = i * each; j < (i + 1) * each; ++j) {
          plan.push_back({e, senders[i], receivers[j]});
        }
        // The first senders serve one receiver more each.
        const std::size_t extra = senders.size() * each + i;
        if (extra < receivers.size() && !MOESAIC_FAULT(eplb_forget_remaining_receivers)) {
          plan.push_back({e, senders[i], receivers[extra]});
        }
      }
    }
    return plan;
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

Result<std::vector<double>> rank_loads(std::span<const double> load,
                                       std::span<const std::int32_t> physical_to_logical,
                                       int num_ranks) {
  if (num_ranks < 1 || physical_to_logical.size() % at(num_ranks) != 0) {
    return invalid(fmt::format("num_ranks: got {}, need a divisor of {} slots", num_ranks,
                               physical_to_logical.size()));
  }
  // Not by make_expert_maps, whose table of slots may be as large as both lists multiplied.
  try {
    MOESAIC_ASSIGN_OR_RETURN(
        const Ids replicas,
        count_replicas(physical_to_logical, static_cast<std::int64_t>(load.size())));
    const std::size_t per_rank = physical_to_logical.size() / at(num_ranks);
    std::vector<double> loads(at(num_ranks), 0.0);
    for (std::size_t s = 0; s < physical_to_logical.size(); ++s) {
      const auto e = at(physical_to_logical[s]);
      loads[s / per_rank] += load[e] / replicas[e];
    }
    if (!std::isfinite(std::accumulate(loads.begin(), loads.end(), 0.0))) {
      return invalid("load: got loads that are not finite, or whose sum is not");
    }
    return loads;
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

double balancedness(std::span<const double> loads, int num_ranks) {
  double mean = 0;
  double most = 0;
  const std::size_t ranks = at(std::max(num_ranks, 1));
  // By a power of two below 1, which changes no quotient: sums of them stay finite.
  int exponent = 0;
  if (!loads.empty()) std::frexp(*std::max_element(loads.begin(), loads.end()), &exponent);
  for (std::size_t first = 0; first + ranks <= loads.size(); first += ranks) {
    double sum = 0;
    double largest = 0;
    for (std::size_t r = first; r < first + ranks; ++r) {
      const double load = std::ldexp(loads[r], -exponent);
      sum += load;
      largest = std::max(largest, load);
    }
    mean += sum / static_cast<double>(ranks);
    most += largest;
  }
  return most > 0 ? mean / most : 1.0;
}

}  // namespace moesaic
