// What a layer over ranks does, as far as options alone decide it: which transport, who has the
// same rows as whom, how many rows a kernel call may see. Pure. Source: docs/spec/parallel.md
// sections 1, 4, 5.
#pragma once

#include <cstdint>

#include "moesaic/fused_moe.h"
#include "moesaic/status.h"

namespace moesaic::layer {

struct RankPlan {
  bool active = false;      // the layer communicates
  ParallelConfig parallel;  // of an active plan
  RankTransport transport = RankTransport::kNone;
  RankEngine engine = RankEngine::kMessages;  // that is wanted, see peer_windows_fit
  PeerMemory peer_memory = {};                // as RankOptions has it
  int size = 1;                               // ranks in all
  int replicas = 1;  // ranks that have the same rows as this one, itself included
  int replica = 0;   // which of them this is
  // The kernel returns complete sums for the rows it was given: nobody reduces them again, and each
  // replica passes its share of the rows instead of all.
  bool reduced = true;
  bool leaves_sum = false;     // not reduced, and replicas add up their outputs themselves
  bool per_slot = false;       // slots come back one by one and are added at home
  bool slots_as_rows = false;  // per slot on a CPU: each slot is a row of its own for the kernel
  DType combine_dtype = DType::kF32;  // of partial sums on their way back
  std::int64_t pair_capacity = 0;     // as RankOptions has it
  std::int64_t kernel_rows = 0;       // that this rank passes to the kernel in one call, at most
  std::int64_t experts_rows = 0;      // that its experts may see in one call
  // Two batches of a call are under way at once (dual_batch_tokens).
  int in_flight = 1;
  std::int64_t batch_rows = 0;  // of a batch, at most
};

// A stretch of rows.
struct RowRange {
  std::int64_t first = 0, count = 0;
};
// The rows among `rows` for which replica `replica` of `replicas` is responsible: stretches of
// ceil(rows / replicas), the last ones shorter or empty.
RowRange replica_share(std::int64_t rows, int replicas, int replica);

// kInvalidArgument when the communicator is not that of options.parallel; kUnsupported when the
// transport cannot serve it (says why), or kPerSlot with slices of experts; kLimitExceeded when the
// rows of all ranks exceed 2^31-1.
Result<RankPlan> plan_ranks(const FusedMoE::Options& options, std::int64_t top_k);

// ok, or why rows of a plan for this device do not travel through peer windows, whatever the machine.
Status peer_windows_fit(const RankPlan& plan, Device device);

}  // namespace moesaic::layer
