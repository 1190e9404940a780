// Expert load balancing: which physical slot holds which logical expert, computed from measured
// load, and what must move when that changes. No communication here. Symbols: L logical experts, P
// physical slots; rank r of R owns slots r*P/R .. (r+1)*P/R - 1.
// Source: docs/spec/parallel.md sections 6 to 9; the algorithm is that of the public EPLB
// reference, computed in double instead of fp32, ties to the lower index.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moesaic/status.h"

namespace moesaic {

struct EplbShape {
  std::int64_t num_physical = 0;
  int num_ranks = 1;
  int num_nodes = 1;   // hosts; ranks of one host are consecutive
  int num_groups = 1;  // of the grouped router; a group's experts are consecutive
};
// physical_to_logical [P] for the loads [L] of one layer. num_groups % num_nodes == 0:
// hierarchical, groups are packed onto nodes, then each node's experts replicated and packed onto
// its ranks. Otherwise global: as if there were one group and one node. Two copies of an expert may
// land on one rank. kInvalidArgument names the count that does not divide or the load that is
// negative or not finite; kLimitExceeded for more than 2^20 slots; kOutOfMemory.
Result<std::vector<std::int32_t>> rebalance_experts(std::span<const double> load,
                                                    const EplbShape& shape);

// Where experts are before anything was measured: 0 .. L-1, then i mod L for the redundant slots.
Result<std::vector<std::int32_t>> initial_physical_to_logical(std::int64_t num_logical,
                                                              std::int64_t num_physical);

// All three maps, consistent with each other: what the router reads (EplbState).
struct ExpertMaps {
  std::vector<std::int32_t> physical_to_logical;  // [P]
  std::vector<std::int32_t> logical_to_physical;  // [L, max_replicas], ascending, -1 padded
  std::vector<std::int32_t> replica_count;        // [L], >= 1
  std::int64_t max_replicas = 0;
};
// kInvalidArgument when an entry is outside [0, L) or an expert has no slot (names it).
Result<ExpertMaps> make_expert_maps(std::span<const std::int32_t> physical_to_logical,
                                    std::int64_t num_logical);

// `wanted` with the slots of each rank reordered so that an expert which stays on its rank stays in
// its slot where it can; which experts a rank has does not change. kInvalidArgument unless both
// have the same length, a multiple of num_ranks.
Result<std::vector<std::int32_t>> preserve_slots(std::span<const std::int32_t> current,
                                                 std::span<const std::int32_t> wanted,
                                                 int num_ranks);

// An expert's weights going from one rank to another; from != to.
struct ExpertTransfer {
  std::int32_t expert = 0;
  std::int32_t from = 0, to = 0;
  bool operator==(const ExpertTransfer&) const = default;
};
// The same list on every rank, ascending in expert: each rank that needs an expert it did not hold
// receives it once, senders share the work. -1 in a map: nothing there (or wanted).
// kInvalidArgument for maps of different length, or an expert that nobody holds.
Result<std::vector<ExpertTransfer>> plan_transfers(std::span<const std::int32_t> current,
                                                   std::span<const std::int32_t> wanted,
                                                   int num_ranks);

// Load of each rank when an expert's load is shared evenly by its copies. The maps are valid.
Result<std::vector<double>> rank_loads(std::span<const double> load,
                                       std::span<const std::int32_t> physical_to_logical,
                                       int num_ranks);
// Sum over layers of the mean rank load / sum over layers of the largest: 1 is perfect, 1/R all on
// one rank; 1 when there is no load. `loads` is [layers, R].
double balancedness(std::span<const double> loads, int num_ranks);

// Physical loads of the last `window` steps of one layer, kept as logical loads, so that a
// rearrangement does not falsify them.
class LoadWindow {
 public:
  // kInvalidArgument for sizes < 1, kOutOfMemory.
  static Result<LoadWindow> create(std::int64_t num_logical, std::int64_t window);
  // Adds one step and forgets the oldest of a full window. kInvalidArgument when sizes differ or an
  // id is outside [0, L).
  Status record(std::span<const std::int32_t> physical_load,
                std::span<const std::int32_t> physical_to_logical);
  // [L], sum over the window; steps not yet recorded count as zero.
  std::span<const double> load() const { return sum_; }

 private:
  LoadWindow() = default;
  std::int64_t num_logical_ = 0, window_ = 0, next_ = 0;
  std::vector<double> steps_;  // [window, L]
  std::vector<double> sum_;
};

}  // namespace moesaic
