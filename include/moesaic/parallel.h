// Where this process stands among its peers, and which experts and rows it therefore owns. No
// communication here. Source: docs/spec/parallel.md sections 1 to 4.
#pragma once

#include <cstdint>
#include <span>
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

// The expert map in the form of a mask: 1 for an expert of this rank and 0 for others, then 1 for
// each shared expert that is fused into the experts' list, then a 0 that stops a reader. The map
// itself gains n_r + i for fused shared expert i. Errors as make_expert_map, kInvalidArgument for a
// negative number of shared experts.
struct MaskedExpertMap {
  std::vector<std::int32_t> map;   // [num_experts + fused_shared]
  std::vector<std::int32_t> mask;  // [num_experts + fused_shared + 1]
};
Result<MaskedExpertMap> make_masked_expert_map(std::int64_t num_experts,
                                               const ParallelConfig& config,
                                               std::int64_t fused_shared);

// Where things stand after the world has changed to new_ep_size ranks of which this is new_ep_rank.
struct ExpertOwnership {
  ParallelConfig config;
  std::vector<std::int64_t> local_ids;
  std::vector<std::int32_t> expert_map;  // empty when new_ep_size == 1
};
// dp_size becomes new_ep_size where it was ep_size (every rank has rows of its own) and must divide
// it otherwise. Errors as make_expert_map and validate().
Result<ExpertOwnership> update_expert_map(std::int64_t num_experts, const ParallelConfig& config,
                                          int new_ep_size, int new_ep_rank);

// What decides whether round robin may be used (see ExpertPlacement).
struct PlacementFacts {
  int num_expert_group = 1;
  std::int64_t num_redundant_experts = 0;
  bool enable_eplb = false;
  // The transport is an all-to-all, and if so whether it takes routing tables.
  bool all_to_all = false;
  bool takes_routing_tables = false;
};
// `wanted`, or linear with one warning to the log sink that says why. kInvalidArgument when EPLB is
// asked for and num_experts does not divide by ep_size, or redundant experts without EPLB.
Result<ExpertPlacement> resolve_placement(ExpertPlacement wanted, std::int64_t num_experts,
                                          int ep_size, const PlacementFacts& facts);

// Round robin seen through a transport that assumes linear ownership: ids are renumbered so that
// rank r's experts are consecutive.
//   global_to_physical[g]  position of expert g in that order
//   physical_to_global     its inverse
//   local_to_global        this rank's experts, [n_r]
// With linear placement the first two are the identity. Errors as make_expert_map.
struct RoutingTables {
  std::vector<std::int32_t> global_to_physical, physical_to_global, local_to_global;
};
Result<RoutingTables> make_routing_tables(std::int64_t num_experts, const ParallelConfig& config);

// Row widths that a transport or a weight format asks for; hidden states are padded with zeros to
// them before dispatch and trimmed after combine. Every rank must use the same size.
enum class HiddenRounding : std::uint8_t {
  kNone,
  kHighThroughput,  // bytes of a row up to a multiple of 512
  kLowLatency,      // the next of 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192
};
//   element_bytes  of what travels; matters to kHighThroughput only
// kInvalidArgument for hidden_size < 1 or element_bytes < 1 (or not a divisor of 512),
// kLimitExceeded above 8192 (low latency) or 2^62 bytes.
Result<std::int64_t> round_hidden_size(std::int64_t hidden_size, std::int64_t element_bytes,
                                       HiddenRounding rounding);

// Padded sizes of MXFP4 weights, by the kernel family that reads them.
enum class Mxfp4Padding : std::uint8_t {
  kMarlin,
  kFlashInferTrtllm,
  kFlashInferCutlass,
  kRocm,
  kOther
};
struct LayerSizes {
  std::int64_t hidden_size = 0, intermediate_size = 0;
};
// kMarlin: H to 256, I to 128; kFlashInferTrtllm and kRocm: both to 256; kFlashInferCutlass: both
// to 128; kOther: I to 64. kInvalidArgument for sizes < 1, kLimitExceeded above 2^62.
Result<LayerSizes> round_mxfp4_sizes(const LayerSizes& sizes, Mxfp4Padding padding);

// Rows of each flat rank under sequence parallelism: every dp rank with n tokens gives each of its
// sp ranks ceil(n / sp). kInvalidArgument for negative counts or sp_size < 1.
Result<std::vector<std::int64_t>> sequence_parallel_rows(
    std::span<const std::int64_t> tokens_per_dp_rank, int sp_size);

// One step of a loop that all ranks take together over at most chunk_size rows at a time.
struct TokenChunk {
  std::int64_t first = 0, count = 0;
  bool operator==(const TokenChunk&) const = default;
};
// All ranks take ceil(max_tokens / chunk_size) steps; a rank that has run out takes part with zero
// rows, unless repeat_last_row (transports that want at least one: its last row again, whose result
// is the same). kInvalidArgument for chunk_size < 1, tokens outside [0, max_tokens], or
// repeat_last_row without a row to repeat.
Result<std::vector<TokenChunk>> plan_chunks(std::int64_t tokens, std::int64_t max_tokens,
                                            std::int64_t chunk_size, bool repeat_last_row = false);

}  // namespace moesaic
