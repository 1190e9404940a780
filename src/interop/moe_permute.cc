// Rows by expert without padding.

#include <string>

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
  if (permuted.rank() != 2 || permuted.dim(0) != slots) {
    return Status(StatusCode::kInvalidShape, "permuted: got " + permuted.shape.to_string() +
                                                 ", need [" + std::to_string(slots) + ", C]");
  }
  MOESAIC_RETURN_IF_ERROR(permute::sort_slots_by_expert(
      routing.topk_ids, routing.expert_map, routing.num_experts, routing.num_local_experts,
      expert_first_token_offset, sorted_slots, routing.top_k));
  for (std::size_t row = 0; row < sorted_slots.size(); ++row) {
    inv_permuted_idx[static_cast<std::size_t>(sorted_slots[row])] = static_cast<std::int32_t>(row);
  }
  return permute_rows(routing, inv_permuted_idx, a, permuted, PaddingRows::kUntouched);
}

}  // namespace moesaic
