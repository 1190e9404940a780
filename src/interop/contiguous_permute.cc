// Rows by expert, each expert on a tile boundary.

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "interop/expect.h"
#include "moesaic/interop/permute.h"
#include "permute/sort_slots.h"

namespace moesaic {
namespace {

using interop::expect_length;
using interop::expect_range;

}  // namespace

std::int64_t theoretical_m_alignment(std::int64_t m, int architecture_major) {
  if (architecture_major != 10) return 128;
  std::int64_t alignment = 224;
  while (alignment - 32 >= std::max<std::int64_t>(32, m)) alignment -= 32;
  return alignment;
}

Result<ContiguousRows> contiguous_rows_exact(std::span<const std::int32_t> expert_num_tokens,
                                             std::int64_t alignment) {
  MOESAIC_RETURN_IF_ERROR(expect_range("alignment", alignment, 1));
  std::int64_t sum = 0;
  for (std::size_t e = 0; e < expert_num_tokens.size(); ++e) {
    const std::int64_t count = expert_num_tokens[e];
    if (count < 0) {
      return Status(StatusCode::kInvalidArgument, "expert_num_tokens[" + std::to_string(e) +
                                                      "]: got " + std::to_string(count) +
                                                      ", need a number >= 0");
    }
    sum += round_up(count, alignment);  // below 2^32 each
    MOESAIC_RETURN_IF_ERROR(expect_range("m_sum", sum, 0));
  }
  return ContiguousRows{sum, alignment};
}

Result<ContiguousRows> contiguous_rows_bound(std::int64_t num_slots, std::int64_t num_local_experts,
                                             std::int64_t alignment, std::int64_t theoretical) {
  MOESAIC_RETURN_IF_ERROR(expect_range("num_slots", num_slots, 0));
  MOESAIC_RETURN_IF_ERROR(expect_range("num_local_experts", num_local_experts, 0));
  MOESAIC_RETURN_IF_ERROR(expect_range("alignment", alignment, 1));
  MOESAIC_RETURN_IF_ERROR(expect_range("theoretical alignment", theoretical, 1));
  const std::int64_t a = std::min(alignment, theoretical);
  // Each expert in use wastes at most a - 1 rows, and no more experts are in use than slots.
  const std::int64_t sum =
      round_up(num_slots + std::min(num_slots, num_local_experts) * (a - 1), a);
  MOESAIC_RETURN_IF_ERROR(expect_range("m_sum", sum, 0));
  return ContiguousRows{sum, a};
}

Status validate(const SlotRouting& routing) {
  if (routing.top_k < 1 || routing.topk_ids.size() % static_cast<std::size_t>(routing.top_k) != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "top_k: got " + std::to_string(routing.top_k) + ", need a divisor of the " +
                      std::to_string(routing.topk_ids.size()) + " slots");
  }
  return permute::validate_topk_ids(routing.topk_ids, routing.expert_map, routing.num_experts,
                                    routing.num_local_experts, routing.top_k);
}

Status plan_contiguous_permutation(const SlotRouting& routing, const ContiguousRows& rows,
                                   std::span<std::int64_t> expert_start,
                                   std::span<std::int32_t> expert_ids,
                                   std::span<std::int32_t> inv_perm) {
  MOESAIC_RETURN_IF_ERROR(validate(routing));
  MOESAIC_RETURN_IF_ERROR(expect_range("alignment", rows.alignment, 1));
  MOESAIC_RETURN_IF_ERROR(expect_range("m_sum", rows.m_sum, 0));
  const std::int64_t locals = routing.num_local_experts;
  MOESAIC_RETURN_IF_ERROR(expect_length("expert_start", expert_start.size(), locals + 1));
  MOESAIC_RETURN_IF_ERROR(expect_length("expert_ids", expert_ids.size(), rows.m_sum));
  MOESAIC_RETURN_IF_ERROR(expect_length("inv_perm", inv_perm.size(),
                                        static_cast<std::int64_t>(routing.topk_ids.size())));

  // Counts in expert_start[e + 1], then an exclusive sum of the padded counts.
  std::fill(expert_start.begin(), expert_start.end(), 0);
  for (const std::int32_t id : routing.topk_ids) {
    const std::int32_t e = permute::local_expert_of(id, routing.expert_map);
    if (e >= 0) ++expert_start[static_cast<std::size_t>(e) + 1];
  }
  const std::int64_t alignment = MOESAIC_FAULT(permute_no_alignment) ? 1 : rows.alignment;
  for (std::size_t e = 0; e < static_cast<std::size_t>(locals); ++e) {
    expert_start[e + 1] = expert_start[e] + round_up(expert_start[e + 1], alignment);
  }
  const std::int64_t used = expert_start[static_cast<std::size_t>(locals)];
  if (used > rows.m_sum) {
    return Status(StatusCode::kInvalidArgument,
                  "m_sum: got " + std::to_string(rows.m_sum) + ", need " + std::to_string(used) +
                      " for these ids at alignment " + std::to_string(rows.alignment));
  }

  // expert_start[e] serves as expert e's cursor; then each segment's real rows are labelled and the
  // cursor goes back to where the segment began.
  std::fill(expert_ids.begin(), expert_ids.end(), MOESAIC_FAULT(permute_padding_labelled) ? 0 : -1);
  for (std::size_t s = 0; s < routing.topk_ids.size(); ++s) {
    const std::int32_t e = permute::local_expert_of(routing.topk_ids[s], routing.expert_map);
    if (e < 0) continue;
    const std::int64_t row = expert_start[static_cast<std::size_t>(e)]++;
    expert_ids[static_cast<std::size_t>(row)] = e;
    inv_perm[s] = static_cast<std::int32_t>(row);
  }
  std::int64_t begin = 0;
  for (std::size_t e = 0; e < static_cast<std::size_t>(locals); ++e) {
    const std::int64_t count = expert_start[e] - begin;
    expert_start[e] = begin;
    begin += round_up(count, alignment);
  }
  return {};
}

Status permute_rows(const SlotRouting& routing, std::span<const std::int32_t> inv_perm,
                    ConstTensorView a, TensorView out, PaddingRows padding) {
  MOESAIC_RETURN_IF_ERROR(validate(routing));
  const auto slots = static_cast<std::int64_t>(routing.topk_ids.size());
  MOESAIC_RETURN_IF_ERROR(expect_length("inv_perm", inv_perm.size(), slots));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("out", out, a.dtype));
  if (a.rank() != 2 || a.dim(0) != slots / routing.top_k) {
    return Status(StatusCode::kInvalidShape, "a: got " + a.shape.to_string() + ", need [" +
                                                 std::to_string(slots / routing.top_k) + ", C]");
  }
  if (out.rank() != 2 || out.dim(1) != a.dim(1)) {
    return Status(StatusCode::kInvalidShape, "out: got " + out.shape.to_string() +
                                                 ", need [rows, " + std::to_string(a.dim(1)) + "]");
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape("a", a, a.shape));
  MOESAIC_RETURN_IF_ERROR(expect_shape("out", out, out.shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("a", a));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("out", out));
  MOESAIC_RETURN_IF_ERROR(expect_device("a", a, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_device("out", out, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("a", a, "out", out));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t row_bytes, contiguous_bytes(a.dtype, {a.dim(1)}));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t out_bytes, contiguous_bytes(out.dtype, out.shape));
  if (out_bytes == 0 && slots == 0) return {};

  if (padding == PaddingRows::kZero && out_bytes > 0) {
    std::memset(out.data, 0, static_cast<std::size_t>(out_bytes));
  }
  for (std::int64_t s = 0; s < slots; ++s) {
    const auto at = static_cast<std::size_t>(s);
    if (permute::local_expert_of(routing.topk_ids[at], routing.expert_map) < 0) continue;
    const std::int64_t row = inv_perm[at];
    if (row < 0 || row >= out.dim(0)) {
      return Status(StatusCode::kInvalidArgument,
                    "inv_perm: token " + std::to_string(s / routing.top_k) + ", slot " +
                        std::to_string(s % routing.top_k) + ": got row " + std::to_string(row) +
                        ", need 0 .. " + std::to_string(out.dim(0) - 1));
    }
    if (row_bytes == 0) continue;
    std::memcpy(out.data + row * row_bytes, a.data + (s / routing.top_k) * row_bytes,
                static_cast<std::size_t>(row_bytes));
  }
  return {};
}

}  // namespace moesaic
