// Tables and sizes that an engine's own expert-parallel transport, its quantised kernels and its
// step loop want, derived from the ownership rules of parallel.h. FusedMoE does all of this inside and
// asks for none of it. Pure functions without communication; every rank gets the same answer from the
// same arguments.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moesaic/parallel.h"
#include "moesaic/status.h"

namespace moesaic {

// --- Ownership
// Read by: engines that change the number of ranks while they serve (elastic expert parallelism), and
// those that choose the placement before they choose the transport.

// Where things stand after the world has changed to new_ep_size ranks of which this is new_ep_rank.
struct ExpertOwnership {
  ParallelConfig config;
  std::vector<std::int64_t> local_ids;
  std::vector<std::int32_t> expert_map;  // empty when new_ep_size == 1
};
// dp_size becomes new_ep_size where it was ep_size (every rank has rows of its own) and must divide
// it otherwise; dp_rank is that of the new rank. Sequence parallel ranks (sp_size above 1) stay so:
// sp_size becomes the new engine_tp_size(). Errors as make_expert_map and validate().
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
// wanted and num_experts does not divide by ep_size, or redundant experts without EPLB.
Result<ExpertPlacement> resolve_placement(ExpertPlacement wanted, std::int64_t num_experts,
                                          int ep_size, const PlacementFacts& facts);

// --- Maps in other forms
// make_masked_expert_map is read by: ROCm's AITER kernels. make_routing_tables by: DeepEP's
// low-latency dispatch and other transports that assume linear ownership.

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

// --- Padded sizes
// round_hidden_size is read by: DeepEP (high throughput and low latency); round_mxfp4_sizes by: the
// kernel families that Mxfp4Padding names. Every rank must use the same sizes.

// Row widths that a transport or a weight format asks for; hidden states are padded with zeros to
// them before dispatch and trimmed after combine.
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

// --- Steps that all ranks take together
// Read by: an engine's loop over chunks of tokens (each step is a collective, so that ranks with fewer
// tokens take part too), its sequence parallelism, and its expert load balancing.

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
// repeat_last_row without a row to repeat, and for max_tokens above 2^62; kOutOfMemory for more steps
// than memory holds.
Result<std::vector<TokenChunk>> plan_chunks(std::int64_t tokens, std::int64_t max_tokens,
                                            std::int64_t chunk_size, bool repeat_last_row = false);

// When to record and when to rearrange; the same on all ranks if all call it every step.
class EplbSchedule {
 public:
  struct Options {
    std::int64_t window = 1000, interval = 3000;
  };
  // kInvalidArgument for values < 1.
  static Result<EplbSchedule> create(const Options& options);
  // Whether this step's load belongs into the window.
  bool recording() const { return options_.interval - step_ <= options_.window; }
  // Ends a step (dummy ones too) and says whether to rearrange now. The first time is after a
  // quarter of the interval. While a rearrangement is in flight none begins; the next call asks
  // again.
  bool advance(bool in_flight = false);

 private:
  explicit EplbSchedule(const Options& options);
  Options options_;
  std::int64_t step_ = 0;
};

}  // namespace moesaic
