// Lists of slots by expert, each expert padded to whole blocks, for GEMMs that gather rows
// themselves. Source: the moe_align_block_size step of Triton-style fused MoE kernels.
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/status.h"

namespace moesaic {

// When expert_map (global -> local or -1) takes effect.
enum class ExpertMapMode : std::uint8_t {
  // Align over global ids, then translate expert_ids: blocks of remote experts become -1 and the
  // GEMM must write zeros for their rows.
  kPostMap,
  // Remote slots are dropped before counting: no block covers them and the caller must have zeroed
  // the per-slot output.
  kIgnoreInvalid,
};

struct AlignSizes {
  std::int64_t sorted_ids = 0;
  std::int64_t expert_ids = 0;
};
// Lengths that suffice for any ids: P = n + E (B - 1), or n B when n < E and that is less, rounded
// up to B if asked; and ceil(P / B). n = num_slots, B = block_size. kInvalidArgument (a negative
// size, B < 1), kLimitExceeded (past 2^31 - 1, the range of the lists' int32).
Result<AlignSizes> moe_align_sizes(std::int64_t num_slots, std::int64_t block_size,
                                   std::int64_t num_experts, bool round_up_to_block = false);

//   topk_ids     [n]    in, flat global ids; anything outside [0, E) is ignored: its slot is in no
//                       block, in either mode
//   expert_map   [E]    in, or empty: identity
//   scratch      [E]    work space
//   sorted_ids   [>= P] out, flat slots in ascending order inside an expert, experts in ascending
//                       order (of global ids in kPostMap, of local ones in kIgnoreInvalid), the
//                       sentinel n in all padding up to the end
//   expert_ids   [ceil(len(sorted_ids) / B)]  out, the expert of each block, -1 for unused blocks
//   num_tokens_post_pad  out, entries of sorted_ids that blocks in use cover
// kInvalidArgument (a map entry outside [-1, E), sizes as moe_align_sizes), kInvalidShape,
// kLimitExceeded. Deterministic. O(n + P + E).
Status moe_align_block_size(std::span<const std::int32_t> topk_ids, std::int64_t block_size,
                            std::int64_t num_experts, std::span<const std::int32_t> expert_map,
                            ExpertMapMode mode, std::span<std::int64_t> scratch,
                            std::span<std::int32_t> sorted_ids, std::span<std::int32_t> expert_ids,
                            std::int32_t* num_tokens_post_pad);

// The same for batched activations [E_l, T, ..], where expert e's rows are e T .. e T + counts[e].
//   expert_num_tokens [E_l]                    in, counts in [0, T]
//   sorted_ids        [E_l * ceil(T / B) * B]  out, row numbers e T + i; sentinel E_l T
//   block_ids         [E_l * ceil(T / B)]      out, expert of each block, -1 for unused blocks
// Errors as above; kInvalidArgument names a count outside [0, T].
Status moe_align_block_size_batched(std::span<const std::int32_t> expert_num_tokens,
                                    std::int64_t max_tokens, std::int64_t block_size,
                                    std::span<std::int32_t> sorted_ids,
                                    std::span<std::int32_t> block_ids,
                                    std::int32_t* num_tokens_post_pad);

}  // namespace moesaic
