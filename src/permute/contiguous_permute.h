// Rows copied by expert into one tall matrix in which every expert begins on a tile boundary, the
// layout of grouped GEMMs that look up the expert once per tile. Source: the contiguous layout of
// DeepGEMM.
#pragma once

#include <cstdint>
#include <span>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

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

}  // namespace moesaic
