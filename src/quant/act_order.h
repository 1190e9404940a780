// Act-order ("desc_act"): GPTQ weights whose columns belong to groups in an order of their own,
// given by g_idx. Sorting the columns by group gives ordinary groups; the activations' columns are
// then gathered in the same order. No arithmetic here.
#pragma once

#include <cstdint>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::quant {

// kInvalidArgument naming the first entry of g_idx [K] (I32) outside [0, groups).
Status check_group_index(ConstTensorView g_idx, std::int64_t groups);

// Whether g_idx[k] == k / group for all k, that is, no reordering. group < 1 means one group.
bool is_plain_group_index(ConstTensorView g_idx, std::int64_t group);

// perm [K] I32: the columns sorted by group, equal groups in ascending order of column (a stable
// argsort). Errors: those of check_group_index, shapes, dtypes, overlap. Needs no workspace beyond
// one counter per group.
Status sort_columns_by_group(ConstTensorView g_idx, std::int64_t groups, TensorView perm);

// Whether, after sorting by `perm`, column i belongs to group i / group (the form that backends
// take). False when groups have uneven sizes, as in a tensor-parallel slice of w2.
bool sorted_groups_are_regular(ConstTensorView g_idx, ConstTensorView perm, std::int64_t group);

}  // namespace moesaic::quant
