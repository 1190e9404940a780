// Expert load balancing in a call: logical ids become slots, and loads are counted.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

// In device memory, so that a captured call goes by what is there when it is replayed.
struct BalanceHeader {
  std::int32_t record = 1;
  std::int32_t next = 0;  // row of the ring for the step that is counted
};

struct BalanceState {
  std::int32_t num_logical = 0, num_physical = 0, window = 1;  // L, P, W
  BalanceHeader* header = nullptr;
  // Slots of expert e: slots[first[e]] to slots[first[e + 1] - 1], in the order of replicas.
  std::int32_t* first = nullptr;   // [L + 1]
  std::int32_t* slots = nullptr;   // [P]
  std::int32_t* expert = nullptr;  // [P], in each slot
  std::uint32_t* step = nullptr;   // [P], of the step that is counted
  std::uint32_t* total = nullptr;  // [P]
  std::uint32_t* ring = nullptr;   // [W, L]
};

// mapped [count]: of position p and expert e = ids[p] replica p mod (replicas of e), -1 for an id
// outside [0, L), which counts nowhere. May be `ids`. Source: docs/spec/routing.md section 8.
// Returns a cudaError_t value, as the other; both are capturable.
int launch_balance_ids(const BalanceState& state, const std::int32_t* ids, std::int64_t count,
                       std::int32_t* mapped, void* stream);
// Ends a step: its load goes into the ring and the totals, if it is recorded.
int launch_balance_step(const BalanceState& state, void* stream);

}  // namespace moesaic::cuda
