#include "permute/sort_slots.h"

#include <limits>
#include <string>

#include "core/fault.h"

namespace moesaic::permute {
namespace {

Status bad_size(const char* field, std::size_t got, std::int64_t need) {
  return Status(StatusCode::kInvalidShape, std::string(field) + ": got " + std::to_string(got) +
                                               " entries, need " + std::to_string(need));
}

}  // namespace

Status validate_topk_ids(std::span<const std::int32_t> topk_ids,
                         std::span<const std::int32_t> expert_map, std::int64_t num_experts,
                         std::int64_t num_local_experts, std::int64_t top_k) {
  if (num_experts < 0 || num_experts > std::numeric_limits<std::int32_t>::max()) {
    return Status(StatusCode::kInvalidArgument,
                  "num_experts: got " + std::to_string(num_experts) + ", need 0 .. 2^31-1");
  }
  if (num_local_experts < 0 || num_local_experts > num_experts) {
    return Status(StatusCode::kInvalidArgument,
                  "num_local_experts: got " + std::to_string(num_local_experts) +
                      ", need 0 .. num_experts = " + std::to_string(num_experts));
  }
  if (topk_ids.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    return Status(StatusCode::kLimitExceeded,
                  "topk_ids: got " + std::to_string(topk_ids.size()) + " slots, need <= 2^31-1");
  }
  if (expert_map.empty()) {
    if (num_local_experts != num_experts) {
      return Status(StatusCode::kInvalidArgument, "expert_map: is empty, need one to choose " +
                                                      std::to_string(num_local_experts) +
                                                      " local of " + std::to_string(num_experts) +
                                                      " experts");
    }
  } else if (expert_map.size() != static_cast<std::size_t>(num_experts)) {
    return bad_size("expert_map", expert_map.size(), num_experts);
  }
  for (std::size_t e = 0; e < expert_map.size(); ++e) {
    if (expert_map[e] < -1 || expert_map[e] >= num_local_experts) {
      return Status(StatusCode::kInvalidArgument,
                    "expert_map[" + std::to_string(e) + "]: got " + std::to_string(expert_map[e]) +
                        ", need -1 .. " + std::to_string(num_local_experts - 1));
    }
  }
  for (std::size_t s = 0; s < topk_ids.size(); ++s) {
    if (topk_ids[s] >= -1 && topk_ids[s] < num_experts) continue;
    std::string where = "flat slot " + std::to_string(s);
    if (top_k > 0) {
      const auto k = static_cast<std::size_t>(top_k);
      where = "token " + std::to_string(s / k) + ", slot " + std::to_string(s % k);
    }
    return Status(StatusCode::kInvalidArgument, "topk_ids: " + where + ": got expert " +
                                                    std::to_string(topk_ids[s]) + ", need -1 .. " +
                                                    std::to_string(num_experts - 1));
  }
  return {};
}

Status sort_slots_by_expert(std::span<const std::int32_t> topk_ids,
                            std::span<const std::int32_t> expert_map, std::int64_t num_experts,
                            std::int64_t num_local_experts,
                            std::span<std::int64_t> expert_first_slot,
                            std::span<std::int32_t> sorted_slots, std::int64_t top_k) {
  MOESAIC_RETURN_IF_ERROR(
      validate_topk_ids(topk_ids, expert_map, num_experts, num_local_experts, top_k));
  const auto locals = static_cast<std::size_t>(num_local_experts);
  if (expert_first_slot.size() != locals + 1) {
    return bad_size("expert_first_slot", expert_first_slot.size(), num_local_experts + 1);
  }
  if (sorted_slots.size() != topk_ids.size()) {
    return bad_size("sorted_slots", sorted_slots.size(),
                    static_cast<std::int64_t>(topk_ids.size()));
  }

  // Count into first[e + 1], then sum up: first[e] is where expert e begins.
  for (std::int64_t& n : expert_first_slot) n = 0;
  for (const std::int32_t id : topk_ids) {
    const std::int32_t e = local_expert_of(id, expert_map);
    if (e >= 0) ++expert_first_slot[static_cast<std::size_t>(e) + 1];
  }
  for (std::size_t e = 0; e < locals; ++e) expert_first_slot[e + 1] += expert_first_slot[e];

  // Place in ascending slot order (stable), using first[e] as expert e's cursor; afterwards each
  // cursor stands where the next expert begins, so shifting by one restores the offsets.
  std::int64_t remote = expert_first_slot[locals];
  for (std::size_t s = 0; s < topk_ids.size(); ++s) {
    const std::int32_t e = local_expert_of(topk_ids[s], expert_map);
    std::int64_t& cursor = e >= 0 ? expert_first_slot[static_cast<std::size_t>(e)] : remote;
    sorted_slots[static_cast<std::size_t>(cursor++)] = static_cast<std::int32_t>(s);
  }
  for (std::size_t e = locals; e > 0; --e) expert_first_slot[e] = expert_first_slot[e - 1];
  expert_first_slot[0] = 0;
  if (MOESAIC_FAULT(permute_sort_off_by_one) && locals > 1) ++expert_first_slot[1];
  return {};
}

}  // namespace moesaic::permute
