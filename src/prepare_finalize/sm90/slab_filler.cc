#include "prepare_finalize/sm90/slab_filler.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/checked.h"
#include "cuda/device_memory.h"

namespace moesaic::cuda {
namespace {

std::int32_t narrow(std::int64_t v) { return static_cast<std::int32_t>(v); }

}  // namespace

Result<SlabMemory> SlabFiller::carve(Arena& arena, std::int64_t tokens) const {
  const auto pairs = checked_mul(tokens, p_.top_k);
  if (!pairs || *pairs > std::int64_t{1} << 30) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("tokens: got {} of {} experts each, need at most 2^30 pairs", tokens,
                              p_.top_k));
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t slabs, contiguous_bytes(dtype_, shape()));
  SlabMemory m;
  m.counts = arena.take<std::int32_t>(p_.num_local_experts);
  m.slot_rows = arena.take<std::int32_t>(*pairs);
  m.slabs = arena.take<std::byte>(slabs);
  m.pair_of_row = arena.take<std::int32_t>(*pairs);
  m.row_of_pair = arena.take<std::int32_t>(*pairs);
  m.weight_of_row = arena.take<float>(*pairs);
  m.max_groups = max_group_records(*pairs, p_.num_local_experts, std::max<std::int64_t>(*pairs, 1));
  m.groups = arena.take<GroupRecord>(m.max_groups);
  m.group_done = arena.take<std::uint32_t>(m.max_groups);
  m.control = arena.take<std::uint32_t>(2);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return m;
}

Status SlabFiller::make_list(const SlabSource& from, const SlabMemory& to, void* stream) const {
  AlignParams p;
  p.topk_ids = from.topk_ids;
  p.topk_weights = from.topk_weights;
  p.expert_map = from.expert_map;
  p.pairs = narrow(from.hidden_states.dim(0) * p_.top_k);
  p.num_experts = narrow(p_.num_experts);
  p.num_local_experts = narrow(p_.num_local_experts);
  p.rows_per_record = p.pairs;
  p.max_groups = narrow(to.max_groups);
  p.pair_of_row = to.pair_of_row;
  p.weight_of_row = to.weight_of_row;
  p.row_of_pair = to.row_of_pair;
  p.groups = to.groups;
  p.group_done = to.group_done;
  p.next_item = to.control;
  p.num_groups = to.control + 1;
  return check_call("prepare: list", launch_align(p, nullptr, traits_, stream));
}

Status SlabFiller::fill(const SlabSource& from, const SlabMemory& to, void* stream) const {
  const std::int64_t tokens = from.hidden_states.dim(0);
  if (tokens == 0) return fill_zero("prepare: counts", to.counts, p_.num_local_experts * 4, stream);
  if (p_.num_local_experts > 0) MOESAIC_RETURN_IF_ERROR(make_list(from, to, stream));
  FillSlabsParams p;
  p.x = from.hidden_states.data;
  p.x_dtype = from.hidden_states.dtype;
  p.x_stride = tokens == 1 ? p_.hidden_size : from.hidden_states.strides[0];
  p.columns = p_.hidden_size;
  p.weights = p_.apply_router_weight_on_input ? from.topk_weights : nullptr;
  p.topk_ids = from.topk_ids;
  p.expert_map = from.expert_map;
  p.pairs = narrow(tokens * p_.top_k);
  p.top_k = narrow(p_.top_k);
  p.num_experts = narrow(p_.num_experts);
  p.num_local_experts = narrow(p_.num_local_experts);
  p.groups = to.groups;
  p.num_groups = to.control + 1;
  p.row_of_pair = to.row_of_pair;
  p.slab_rows = narrow(p_.max_tokens);
  p.counts = to.counts;
  p.slot_rows = to.slot_rows;
  p.slabs = to.slabs;
  p.dtype = dtype_;
  return check_call("prepare: slabs", launch_fill_slabs(p, stream));
}

}  // namespace moesaic::cuda
