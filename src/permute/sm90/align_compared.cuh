// The work list by one block whose threads have a pair each and compare it with all pairs: up to
// kComparedPairs pairs that takes fewer barriers than counting and scanning. The same list.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "cuda/fault.cuh"
#include "permute/sm90/align.h"

namespace moesaic::cuda {

// By the first kComparedPairs threads of a block at least, with ids and weights there. `codes`:
// kComparedPairs words of shared memory, 16-byte aligned.
__device__ __forceinline__ void place_compared_pairs(const AlignParams& p, std::uint32_t* codes) {
  constexpr std::uint32_t kNone = 0xFFFFFFFE;  // behind every expert
  const auto threads = static_cast<std::int32_t>(blockDim.x);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t padded = (p.pairs + 3) / 4 * 4;
  if (thread == 0) *p.next_item = 0;
  for (std::int32_t i = thread; i < p.bands; i += threads) p.band_done[i] = 0;
  for (std::int32_t i = thread; i < p.max_groups; i += threads) p.group_done[i] = 0;
  for (std::int32_t i = thread; i < padded; i += threads) {
    std::int32_t id = i < p.pairs ? p.topk_ids[i] : -1;
    if (id >= p.num_experts) id = -1;
    if (id >= 0 && p.expert_map != nullptr) id = p.expert_map[id];
    codes[i] = id >= 0 && id < p.num_local_experts ? static_cast<std::uint32_t>(id) * 2 : kNone;
  }
  __syncthreads();
  // Rank among the pairs of the same expert; every rows_per_record-th opens a record, which bit 0
  // then says.
  const bool has_pair = thread < p.pairs;
  const std::uint32_t mine = has_pair ? codes[thread] : kNone;
  std::int32_t rank = 0;
  if (has_pair) {
    for (std::int32_t q = 0; q < thread; ++q) rank += codes[q] == mine ? 1 : 0;
  }
  MOESAIC_CUDA_FAULT(
      cuda_align_compared_pairs_in_reverse, rank = 0;
      for (std::int32_t q = thread + 1; q < p.pairs; ++q) rank += codes[q] == mine ? 1 : 0;)
  const bool opens = mine != kNone && rank % p.rows_per_record == 0;
  __syncthreads();
  if (opens) codes[thread] = mine | 1;
  __syncthreads();
  if (!has_pair) return;
  std::int32_t rows = 0, rows_before = 0, groups_before = 0, groups = 0;
#pragma unroll 4
  for (std::int32_t q = 0; q < padded; q += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(codes + q);
    for (const std::uint32_t code : {four.x, four.y, four.z, four.w}) {
      const bool before = code < mine;
      rows += (code & ~1U) == mine ? 1 : 0;
      rows_before += before ? 1 : 0;
      groups_before += before ? static_cast<std::int32_t>(code & 1) : 0;
      groups += static_cast<std::int32_t>(code & 1);
    }
  }
  if (thread == 0) *p.num_groups = static_cast<std::uint32_t>(groups);
  const std::int32_t row = rows_before + rank;
  p.row_of_pair[thread] = mine != kNone ? row : -1;
  if (mine == kNone) return;
  p.pair_of_row[row] = thread;
  p.weight_of_row[row] = p.topk_weights[thread];
  if (opens) {
    p.groups[groups_before + rank / p.rows_per_record] = {static_cast<std::int32_t>(mine / 2),
                                                          rows_before, rows, groups_before};
  }
}

}  // namespace moesaic::cuda
