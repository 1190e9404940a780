// Grouping of tokens by expert in the three forms that the grouped GEMMs of other engines take, and
// the way back. Moesaic's own backends need none of them: they sort slots and gather rows inside.
// All functions write to the caller's buffers, allocate nothing unless they fail, and are
// deterministic.
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// --- Padded index lists: the GEMM gathers the rows itself
// Read by: Triton-style fused MoE kernels and Marlin's MoE kernel, which take one expert per block
// of slots (their moe_align_block_size step).

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
// kInvalidArgument (a null pointer, a map entry outside [-1, E), sizes as moe_align_sizes), kInvalidShape,
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

// --- Rows copied, every expert starting on a tile boundary
// Read by: DeepGEMM's contiguous grouped GEMMs, which look up the expert once per tile.

// Rows of the permuted matrix (a multiple of alignment) and the row alignment of experts.
// Permutation, workspaces and GEMM must all use the same pair.
struct ContiguousRows {
  std::int64_t m_sum = 0;
  std::int64_t alignment = 0;
};

// Alignment that a GPU kernel needs for m rows in all: 128, but on architecture 10.x the smallest
// multiple of 32 in 32 .. 224 that is >= m (224 beyond).
std::int64_t theoretical_m_alignment(std::int64_t m, int architecture_major);

// From the counts of each local expert: sum of the counts, each rounded up to `alignment`.
// kInvalidArgument (a negative count, alignment < 1), kLimitExceeded (m_sum past 2^31 - 1).
Result<ContiguousRows> contiguous_rows_exact(std::span<const std::int32_t> expert_num_tokens,
                                             std::int64_t alignment);

// From shapes alone: an upper bound for any ids, so that sizes never depend on data.
// a = min(alignment, theoretical), m_sum = roundup(n + min(n, E_l) (a - 1), a) for n = M k slots.
Result<ContiguousRows> contiguous_rows_bound(std::int64_t num_slots, std::int64_t num_local_experts,
                                             std::int64_t alignment, std::int64_t theoretical);

// The expert map and sizes shared by the functions below. Ids outside [-1, E) and map entries
// outside [-1, E_l) are refused (kInvalidArgument, naming token, slot and value).
struct SlotRouting {
  std::span<const std::int32_t> topk_ids;    // [M, k] flat, global ids or -1
  std::span<const std::int32_t> expert_map;  // [E] -> local or -1; empty: identity, E_l == E
  std::int64_t top_k = 0;
  std::int64_t num_experts = 0;
  std::int64_t num_local_experts = 0;
};
Status validate(const SlotRouting& routing);

// Where every local slot goes.
//   expert_start  [E_l+1]  out, first row of each expert (a multiple of the alignment); the last
//                          entry is the end of the rows in use
//   expert_ids    [m_sum]  out, local expert of each real row, -1 for padding and the unused tail
//   inv_perm      [M*k]    out, row of each local slot, ascending by slot inside an expert; entries
//                          of other slots are not written
// kInvalidArgument as SlotRouting, or when rows.m_sum is too small for these ids (names both);
// kInvalidShape. Deterministic. O(M k + m_sum).
Status plan_contiguous_permutation(const SlotRouting& routing, const ContiguousRows& rows,
                                   std::span<std::int64_t> expert_start,
                                   std::span<std::int32_t> expert_ids,
                                   std::span<std::int32_t> inv_perm);

// What permute_rows leaves in rows that no slot goes to.
enum class PaddingRows : std::uint8_t { kUntouched, kZero };

// Copies token rows to their places: out[inv_perm[t, j]] = a[t] for every local slot.
//   a    [M, C] in, any dtype with whole bytes per row, contiguous (activations, or their scales)
//   out  [R, C] out, the same dtype, contiguous, no overlap with a
// kInvalidArgument when inv_perm of a local slot is outside [0, R), naming token and slot.
Status permute_rows(const SlotRouting& routing, std::span<const std::int32_t> inv_perm,
                    ConstTensorView a, TensorView out, PaddingRows padding);

// --- Rows copied without padding
// Read by: CUTLASS-style grouped GEMMs, which take one offset per expert (their moe_permute step).

// Sorts the slots stably by local expert, remote slots last, and copies the local ones' rows.
//   a                          [M, C]    in, any dtype with whole bytes per row, contiguous
//   expert_first_token_offset  [E_l+1]   out, first row of each expert; the last entry is the
//                                        number of local rows
//   sorted_slots               [M*k]     out, flat slot of each row
//   inv_permuted_idx           [M*k]     out, row of each slot; >= offset[E_l] for remote slots
//   permuted                   [M*k, C]  out, same dtype, contiguous; rows >= offset[E_l] are not
//                                        written
// Errors: as SlotRouting (kInvalidArgument), kInvalidShape, kInvalidDType, kInvalidLayout,
// kAliasing. Deterministic. O(M k C).
Status moe_permute(const SlotRouting& routing, ConstTensorView a,
                   std::span<std::int64_t> expert_first_token_offset,
                   std::span<std::int32_t> sorted_slots, std::span<std::int32_t> inv_permuted_idx,
                   TensorView permuted);

// --- Back to tokens, after either of the two copies

// out[t] = sum over local slots j of weights[t, j] * y[inv_perm[t, j]], in slot order j = 0 .. k-1,
// accumulated in fp32 and rounded once. A token without a local slot gets a row of zeros. Whether a
// slot is local is decided by its id before inv_perm is read, so entries of other slots may hold
// anything.
//   y         [R, H]  in, F32, BF16 or F16, contiguous
//   weights   [M*k]   in, or empty: all 1 (the weight was applied to the input)
//   inv_perm  [M*k]   in, from plan_contiguous_permutation or moe_permute
//   out       [M, H]  out, F32, BF16 or F16, contiguous, no overlap with y
// Error before the final rounding: at most (k + 1) * 2^-24 * sum |w y|. Bits do not depend on the
// other tokens or on R. Errors: as SlotRouting; kInvalidArgument (inv_perm of a local slot outside
// [0, R), naming token and slot), kInvalidShape, kInvalidDType, kInvalidLayout, kAliasing.
// O(M k H).
Status unpermute_and_reduce(const SlotRouting& routing, ConstTensorView y,
                            std::span<const float> weights, std::span<const std::int32_t> inv_perm,
                            TensorView out);

}  // namespace moesaic
