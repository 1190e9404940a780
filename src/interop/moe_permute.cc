// Rows by expert without padding.

#include <string>

#include "interop/expect.h"
#include "moesaic/interop/permute.h"
#include "permute/sort_slots.h"

namespace moesaic {

Status moe_permute(const SlotRouting& routing, ConstTensorView a,
                   std::span<std::int64_t> expert_first_token_offset,
                   std::span<std::int32_t> sorted_slots, std::span<std::int32_t> inv_permuted_idx,
                   TensorView permuted) {
  MOESAIC_RETURN_IF_ERROR(validate(routing));
  const auto slots = static_cast<std::int64_t>(routing.topk_ids.size());
  if (inv_permuted_idx.size() != routing.topk_ids.size()) {
    return Status(StatusCode::kInvalidShape, "inv_permuted_idx: got " +
                                                 std::to_string(inv_permuted_idx.size()) +
                                                 " entries, need " + std::to_string(slots));
  }
  // Here under the names that the caller knows them by.
  MOESAIC_RETURN_IF_ERROR(interop::expect_length("expert_first_token_offset",
                                                 expert_first_token_offset.size(),
                                                 routing.num_local_experts + 1));
  const std::string columns = a.rank() == 2 ? std::to_string(a.dim(1)) : "C";
  if (permuted.rank() != 2 || permuted.dim(0) != slots ||
      (a.rank() == 2 && permuted.dim(1) != a.dim(1))) {
    return Status(StatusCode::kInvalidShape, "permuted: got " + permuted.shape.to_string() +
                                                 ", need [" + std::to_string(slots) + ", " +
                                                 columns + "]");
  }
  MOESAIC_RETURN_IF_ERROR(expect_dtype("permuted", permuted, a.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape("permuted", permuted, permuted.shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("permuted", permuted));
  MOESAIC_RETURN_IF_ERROR(expect_device("permuted", permuted, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("a", a, "permuted", permuted));
  MOESAIC_RETURN_IF_ERROR(permute::sort_slots_by_expert(
      routing.topk_ids, routing.expert_map, routing.num_experts, routing.num_local_experts,
      expert_first_token_offset, sorted_slots, routing.top_k));
  for (std::size_t row = 0; row < sorted_slots.size(); ++row) {
    inv_permuted_idx[static_cast<std::size_t>(sorted_slots[row])] = static_cast<std::int32_t>(row);
  }
  return permute_rows(routing, inv_permuted_idx, a, permuted, PaddingRows::kUntouched);
}

}  // namespace moesaic
