#include "quant/act_order.h"

#include <new>
#include <string>
#include <vector>

#include "core/fault.h"
#include "quant/arguments.h"

namespace moesaic::quant {
namespace {

Status expect_index_vector(std::string_view field, const ConstTensorView& t) {
  if (t.rank() != 1) {
    return Status(StatusCode::kInvalidShape,
                  std::string(field) + ": got " + t.shape.to_string() + ", need rank 1 [K]");
  }
  return check_arguments({{field, t, accept(DType::kI32), t.shape}});
}

Status bad_entry(std::string_view field, std::int64_t at, std::int64_t got, std::string need) {
  return Status(StatusCode::kInvalidArgument, std::string(field) + "[" + std::to_string(at) +
                                                  "]: got " + std::to_string(got) + ", need " +
                                                  std::move(need));
}

}  // namespace

Status check_group_index(ConstTensorView g_idx, std::int64_t groups) {
  MOESAIC_RETURN_IF_ERROR(expect_index_vector("g_idx", g_idx));
  for (std::int64_t k = 0; k < g_idx.dim(0); ++k) {
    const std::int64_t g = g_idx.as<std::int32_t>()[k];
    if (g < 0 || g >= groups) {
      return bad_entry("g_idx", k, g, "0 .. " + std::to_string(groups - 1) + " (groups of scales)");
    }
  }
  return {};
}

bool is_plain_group_index(ConstTensorView g_idx, std::int64_t group) {
  for (std::int64_t k = 0; k < g_idx.dim(0); ++k) {
    if (g_idx.as<std::int32_t>()[k] != (group < 1 ? 0 : k / group)) return false;
  }
  return true;
}

Status sort_columns_by_group(ConstTensorView g_idx, std::int64_t groups, TensorView perm) {
  MOESAIC_RETURN_IF_ERROR(expect_positive("groups", groups));
  MOESAIC_RETURN_IF_ERROR(check_group_index(g_idx, groups));
  const std::int64_t k = g_idx.dim(0);
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"g_idx", g_idx, accept(DType::kI32), {k}},
      {"perm", perm, accept(DType::kI32), {k}, true},
  }));
  if (k > INT32_MAX) {
    return Status(StatusCode::kLimitExceeded,
                  "g_idx: got " + std::to_string(k) + " columns, need < 2^31 for I32 indices");
  }
  try {
    // Counting sort: stable by construction. first[g] = next free place of group g.
    std::vector<std::int64_t> first(static_cast<std::size_t>(groups) + 1);
    for (std::int64_t i = 0; i < k; ++i) {
      ++first[static_cast<std::size_t>(g_idx.as<std::int32_t>()[i]) + 1];
    }
    for (std::size_t g = 1; g < first.size(); ++g) first[g] += first[g - 1];
    for (std::int64_t i = 0; i < k; ++i) {
      const auto g = static_cast<std::size_t>(g_idx.as<std::int32_t>()[i]);
      const std::int64_t to = MOESAIC_FAULT(quant_ignore_act_order) ? i : first[g]++;
      perm.as<std::int32_t>()[to] = static_cast<std::int32_t>(i);
    }
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  "groups: cannot allocate " + std::to_string(groups) + " counters");
  }
  return {};
}

bool sorted_groups_are_regular(ConstTensorView g_idx, ConstTensorView perm, std::int64_t group) {
  for (std::int64_t i = 0; i < perm.dim(0); ++i) {
    const std::int64_t g = g_idx.as<std::int32_t>()[perm.as<std::int32_t>()[i]];
    if (g != (group < 1 ? 0 : i / group)) return false;
  }
  return true;
}

}  // namespace moesaic::quant
