// Where this process stands among its peers, and which experts and rows it therefore owns. No
// communication here. Source: docs/spec/parallel.md sections 1 to 4.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic {

// Which experts rank r of ep owns; n_r = E div ep, plus one for the first E mod ep ranks.
//   kLinear      n_r consecutive ids, ranks in order; local index = id - first id of the rank
//   kRoundRobin  r, r + ep, r + 2 ep, ...; local index = id div ep
// Round robin spreads the groups of a grouped router over the ranks. An engine should ask for it
// only when num_expert_group > 1, there are no redundant experts and no expert load balancing,
// ep > 1, and tokens travel without all-to-all kernels or with kernels that take routing tables;
// otherwise it falls back to linear (with a warning). That decision needs facts that are not known
// here (the transport), so this folder does exactly what `placement` says and never falls back.
enum class ExpertPlacement : std::uint8_t { kLinear, kRoundRobin };
std::string_view expert_placement_name(ExpertPlacement placement);  // "linear", "round_robin"

// Sizes and ranks as an engine states them: tensor, prefill-context and data parallelism.
struct ParallelSizes {
  int tp_size = 1, tp_rank = 0;
  int pcp_size = 1, pcp_rank = 0;
  int dp_size = 1, dp_rank = 0;
  bool enable_expert_parallel = false;
  // The layer's rows are split over the tp ranks (each has ceil(n / tp) of them) instead of being
  // the same on all.
  bool sequence_parallel = false;
};

// What the MoE layer sees after flattening (tp is 1 when experts are parallel, and the reverse).
struct ParallelConfig {
  int tp_size = 1, tp_rank = 0;
  int ep_size = 1, ep_rank = 0;
  int dp_size = 1, dp_rank = 0;
  ExpertPlacement placement = ExpertPlacement::kLinear;
  int pcp_size = 1;
  int sp_size = 1;  // > 1: the tp ranks of the engine have different rows

  // flat_size = dp*pcp*tp, flat_rank = (dp_rank*pcp + pcp_rank)*tp + tp_rank. With expert
  // parallelism and flat_size > 1: ep = flat, tp = 1; else tp = flat, ep = 1. dp and pcp are kept;
  // sp = tp if sequence_parallel, else 1.
  // kInvalidArgument for a size < 1 or a rank outside its size (names the field),
  // kLimitExceeded when flat_size does not fit 31 bits.
  static Result<ParallelConfig> from_sizes(const ParallelSizes& sizes);
  // kInvalidArgument (names the field) for a size < 1, a rank outside its size, tp_size > 1
  // together with ep_size > 1, a dp_size, pcp_size or their product that does not divide the
  // flattened size (the larger of tp and ep), an sp_size that is neither 1 nor the engine's tp
  // size, or a placement outside the enumeration.
  Status validate() const;

  int flat_size() const { return tp_size > ep_size ? tp_size : ep_size; }
  int flat_rank() const { return tp_size > ep_size ? tp_rank : ep_rank; }
  // Size of the engine's tensor-parallel group, whose ranks are neighbours.
  int engine_tp_size() const { return flat_size() / (dp_size * pcp_size); }
  bool is_sequence_parallel() const { return sp_size > 1; }
  // Whether rows travel to the experts' ranks by an all-to-all: expert parallelism whose ranks have
  // different rows. Otherwise every rank has all rows, or they are gathered.
  bool use_all_to_all() const { return ep_size > 1 && (dp_size > 1 || is_sequence_parallel()); }
  // Flat ranks whose rows differ from this one's and that together hold every row once, this one
  // included, ascending: all ranks with sequence parallelism, else those with the same rank inside
  // the engine's tp group (one per dp and pcp rank).
  std::vector<int> token_group() const;
  // Flat ranks that hold the same rows as this one, this one included, ascending: the engine's tp
  // group, or this rank alone with sequence parallelism. Partial sums over its ranks' experts are
  // added up inside it.
  std::vector<int> replica_group() const;
};

// expert_map[num_experts]: global id -> local index, or -1 for an expert of another rank. Empty
// when ep_size == 1: there is no map then, rather than an identity. A rank may own no expert at
// all (num_experts < ep_size). Errors: those of config.validate(), kInvalidArgument when
// num_experts is negative, kLimitExceeded when it does not fit 31 bits, kOutOfMemory.
Result<std::vector<std::int32_t>> make_expert_map(std::int64_t num_experts,
                                                  const ParallelConfig& config);
// The rank that owns each expert, [num_experts]. Errors as make_expert_map.
Result<std::vector<std::int32_t>> expert_owners(std::int64_t num_experts,
                                                const ParallelConfig& config);
// Global ids of the experts that this rank owns, in local order and ascending (all of them when
// ep_size == 1). Errors as make_expert_map.
Result<std::vector<std::int64_t>> local_expert_ids(std::int64_t num_experts,
                                                   const ParallelConfig& config);

}  // namespace moesaic
