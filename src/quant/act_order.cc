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

// Each of 0 .. K-1 exactly once.
Status check_permutation(const ConstTensorView& perm) {
  MOESAIC_RETURN_IF_ERROR(expect_index_vector("perm", perm));
  const std::int64_t k = perm.dim(0);
  try {
    std::vector<bool> seen(static_cast<std::size_t>(k));
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t p = perm.as<std::int32_t>()[i];
      if (p < 0 || p >= k) return bad_entry("perm", i, p, "0 .. " + std::to_string(k - 1));
      if (seen[static_cast<std::size_t>(p)]) return bad_entry("perm", i, p, "each column once");
      seen[static_cast<std::size_t>(p)] = true;
    }
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "perm: cannot allocate " + std::to_string(k) + " bits");
  }
  return {};
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
      perm.as<std::int32_t>()[first[g]++] = static_cast<std::int32_t>(i);
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

Status gather_columns(ConstTensorView in, ConstTensorView perm, TensorView out) {
  MOESAIC_RETURN_IF_ERROR(expect_matrix("in", in));
  MOESAIC_RETURN_IF_ERROR(check_permutation(perm));
  if (dtype_bits(in.dtype) != 8) {
    return Status(StatusCode::kInvalidDType,
                  "in: got " + std::string(dtype_name(in.dtype)) + ", need elements of one byte");
  }
  const std::int64_t k = in.dim(1);
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"in", in, accept(in.dtype), in.shape},
      {"perm", perm, accept(DType::kI32), {k}},
      {"out", out, accept(in.dtype), in.shape, true},
  }));
  for (std::int64_t n = 0; n < in.dim(0); ++n) {
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t from =
          MOESAIC_FAULT(quant_ignore_act_order) ? i : perm.as<std::int32_t>()[i];
      out.data[n * k + i] = in.data[n * k + from];
    }
  }
  return {};
}

Status invert_permutation(ConstTensorView perm, TensorView inverse) {
  MOESAIC_RETURN_IF_ERROR(check_permutation(perm));
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {"perm", perm, accept(DType::kI32), perm.shape},
      {"inverse", inverse, accept(DType::kI32), perm.shape, true},
  }));
  for (std::int64_t i = 0; i < perm.dim(0); ++i) {
    inverse.as<std::int32_t>()[perm.as<std::int32_t>()[i]] = static_cast<std::int32_t>(i);
  }
  return {};
}

}  // namespace moesaic::quant
