// The work list of a call, by what makes it: from ids, or from the counts of slabs.
#pragma once

#include <cstdint>

#include "experts/sm90/experts.h"
#include "experts/sm90/experts_plan.h"
#include "permute/sm90/align.h"
#include "permute/sm90/align_batched.h"

namespace moesaic::cuda {

// Workspace: the arrays of a list by their names (ExpertsWorkspace, GeneralWorkspace). of_rows:
// problem_of_rows of the call.
template <class Workspace>
AlignParams list_of_pairs(const MoeProblem& of_rows, const CudaExpertsArgs& a, const Workspace& w,
                          std::int32_t rows_per_record) {
  AlignParams p;
  p.topk_ids = a.topk_ids;
  p.topk_weights = a.topk_weights;
  p.expert_map = a.expert_map;
  p.pairs = static_cast<std::int32_t>(a.tokens * of_rows.top_k);
  p.rows = a.some_rows;
  p.num_experts = static_cast<std::int32_t>(of_rows.num_experts);
  p.num_local_experts = static_cast<std::int32_t>(of_rows.num_local_experts);
  p.rows_per_record = rows_per_record;
  p.max_groups = static_cast<std::int32_t>(w.max_groups);
  p.pair_of_row = w.pair_of_row;
  p.weight_of_row = w.weight_of_row;
  p.row_of_pair = w.row_of_pair;
  p.groups = w.groups;
  p.group_done = w.group_done;
  p.next_item = w.control;
  p.num_groups = w.control + 1;
  p.band_done = w.band_done;
  return p;
}

template <class Workspace>
BatchedListParams list_of_slabs(const MoeProblem& of_rows, const CudaExpertsArgs& a,
                                const Workspace& w, std::int32_t rows_per_record) {
  BatchedListParams p;
  p.counts = a.slab_counts;
  p.experts = static_cast<std::int32_t>(of_rows.num_local_experts);
  p.slab_rows = static_cast<std::int32_t>(a.tokens);
  p.rows_per_record = rows_per_record;
  p.pair_of_row = w.pair_of_row;
  p.groups = w.groups;
  p.group_done = w.group_done;
  p.next_item = w.control;
  p.num_groups = w.control + 1;
  p.band_done = w.band_done;
  return p;
}

}  // namespace moesaic::cuda
