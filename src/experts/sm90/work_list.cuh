// The work list of at most 32 pairs inside the grouped-GEMM kernel (grouped_gemm.cuh): as
// permute/sm90/align.h makes it, but experts are in the order of their first pair. This saves a
// launch and two reads of memory over a list that another kernel makes.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// One warp, a lane per pair. Where the kernel routes, after route_tokens.
__device__ __forceinline__ void make_list(const GroupedParams& p, int rows_per_record, int lane,
                                          SharedList& list) {
  constexpr unsigned kAll = 0xFFFFFFFFU;
  const ListSource& s = p.own_list.source;
  const bool has_pair = lane < p.own_list.pairs;
  const float* const weights = p.own_list.routes ? list.weights : s.topk_weights;
  const std::int32_t* const ids = p.own_list.routes ? list.ids : s.topk_ids;
  const float weight = has_pair ? weights[lane] : 0.0F;
  std::int32_t id = has_pair ? ids[lane] : -1;
  if (id >= s.num_experts) id = -1;
  if (id >= 0 && s.expert_map != nullptr) id = s.expert_map[id];
  if (id < 0 || id >= s.num_local_experts) id = -1;
  const bool live = id >= 0;
  // The experts of one token that was routed here are distinct.
  const bool distinct = p.own_list.routes && p.own_list.pairs == p.top_k && s.expert_map == nullptr;
  const unsigned same = distinct ? 1U << lane : __match_any_sync(kAll, id);
  const unsigned all_live = __ballot_sync(kAll, live);
  const int rank = __popc(same & ((1U << lane) - 1));
  // Pairs without an expert come behind all others.
  const int first = live ? __ffs(static_cast<int>(same)) - 1 : kListPairs;
  const bool opens = live && rank % rows_per_record == 0;
  const unsigned all_open = __ballot_sync(kAll, opens);
  unsigned before = (1U << lane) - 1;
  if (!distinct) {
    before = 0;
#pragma unroll
    for (int q = 0; q < kListPairs; ++q) {
      before |= (__shfl_sync(kAll, first, q) < first ? 1U : 0U) << q;
    }
  }
  const int rows_before = __popc(before & all_live), groups_before = __popc(before & all_open);
  if (lane == 0) list.num_groups = static_cast<std::uint32_t>(__popc(all_open));
  const int row = rows_before + rank;
  list.row_of_pair[lane] = live ? row : -1;
  if (!live) return;
  list.pair_of_row[row] = lane;
  list.weight_of_row[row] = weight;
  MOESAIC_CUDA_FAULT(cuda_list_in_the_kernel_loses_weights, list.weight_of_row[row] = 1.0F;)
  if (opens) {
    list.groups[groups_before + rank / rows_per_record] = {id, rows_before, __popc(same),
                                                           groups_before};
  }
}

}  // namespace moesaic::cuda
