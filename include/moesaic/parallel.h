// Where this process stands among its peers, and which experts and rows it therefore owns. No
// communication here. Source: spec parallel.md sections 1 and 2.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic {

enum class ExpertPlacement : std::uint8_t { kLinear, kRoundRobin };

// Sizes and ranks as an engine states them.
struct ParallelSizes {
  int tp_size = 1, tp_rank = 0;
  int pcp_size = 1, pcp_rank = 0;
  int dp_size = 1, dp_rank = 0;
  bool enable_expert_parallel = false;
};

// What the MoE layer sees after flattening (tp is 1 when experts are parallel, and the reverse).
struct ParallelConfig {
  int tp_size = 1, tp_rank = 0;
  int ep_size = 1, ep_rank = 0;
  int dp_size = 1, dp_rank = 0;
  ExpertPlacement placement = ExpertPlacement::kLinear;

  // flat = dp*pcp*tp; with expert parallelism ep = flat and tp = 1, else tp = flat and ep = 1.
  // kInvalidArgument for a size < 1 or a rank outside its size (names the field).
  static Result<ParallelConfig> from_sizes(const ParallelSizes& sizes);
  Status validate() const;
};

// expert_map[num_experts]: local index or -1; empty when ep_size == 1. The first (num_experts %
// ep_size) ranks own one expert more. Linear: contiguous ids. Round robin: rank, rank+ep, ...
std::vector<std::int32_t> make_expert_map(std::int64_t num_experts, const ParallelConfig& config);
// Global ids of the experts that this rank owns, in local order (all of them when ep_size == 1).
std::vector<std::int64_t> local_expert_ids(std::int64_t num_experts, const ParallelConfig& config);

}  // namespace moesaic
