#include "layer/expert_balancer.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "core/fault.h"
#include "core/refusal.h"
#include "router/eplb_map.h"

namespace moesaic::layer {

Status check_slots(const SlotShape& shape, std::int64_t window) {
  if (shape.ranks < 1 || shape.num_physical % shape.ranks != 0) {
    return invalid(
        fmt::format("num_redundant_experts: got {} for {} experts, need a sum that is a "
                    "multiple of the {} ranks",
                    shape.num_physical - shape.num_logical, shape.num_logical, shape.ranks));
  }
  if (window < 1) return invalid(fmt::format("eplb_window: got {}, need a number >= 1", window));
  constexpr std::int64_t kMostLoads = std::int64_t{1} << 32;
  if (window <= kMostLoads / std::max<std::int64_t>(shape.num_logical, 1)) return {};
  return {StatusCode::kLimitExceeded,
          fmt::format("eplb_window: got {} for {} experts, need a product of at most {}", window,
                      shape.num_logical, kMostLoads)};
}

Result<std::unique_ptr<ExpertBalancer>> ExpertBalancer::create(const SlotShape& shape,
                                                               std::int64_t window,
                                                               std::unique_ptr<SlotMemory> memory) {
  MOESAIC_RETURN_IF_ERROR(check_slots(shape, window));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int32_t> initial,
                           initial_physical_to_logical(shape.num_logical, shape.num_physical));
  try {
    std::unique_ptr<ExpertBalancer> b(new ExpertBalancer);
    b->shape_ = shape;
    MOESAIC_ASSIGN_OR_RETURN(b->maps_, make_expert_maps(initial, shape.num_logical));
    b->step_load_.assign(initial.size(), 0);
    MOESAIC_ASSIGN_OR_RETURN(LoadWindow made, LoadWindow::create(shape.num_logical, window));
    b->window_ = std::make_unique<LoadWindow>(std::move(made));
    if (memory) {
      b->seen_.assign(initial.size(), 0);
      MOESAIC_RETURN_IF_ERROR(memory->set_maps(b->maps_));
      b->memory_ = std::move(memory);
    }
    return b;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate the maps of experts");
  }
}

std::span<const std::int32_t> ExpertBalancer::local_part(std::span<const std::int32_t> map) const {
  const auto each = static_cast<std::size_t>(shape_.num_physical / shape_.ranks);
  return map.subspan(static_cast<std::size_t>(shape_.rank) * each, each);
}

std::span<const std::int32_t> ExpertBalancer::local_experts() const {
  return local_part(maps_.physical_to_logical);
}

void ExpertBalancer::begin_step() {
  std::fill(step_load_.begin(), step_load_.end(), 0);
  step_slots_ = 0;
}

Status ExpertBalancer::map_ids(std::int32_t* ids, std::int64_t tokens, std::int64_t k) {
  EplbState state;
  state.logical_to_physical = maps_.logical_to_physical;
  state.replica_count = maps_.replica_count;
  state.load = step_load_;
  state.max_replicas = maps_.max_replicas;
  state.record = record_;
  if (MOESAIC_FAULT(layer_load_counts_padding)) {
    for (std::int64_t i = 0; i < tokens * k; ++i) step_load_[0] += ids[i] < 0 ? 1 : 0;
  }
  const std::int64_t first = MOESAIC_FAULT(layer_replicas_by_chunk) ? 0 : step_slots_;
  router::map_logical_to_physical(state, shape_.num_logical, tokens, k, nullptr, ids, first);
  step_slots_ += tokens * k;
  return {};
}

namespace {

void add_load(std::int32_t& view, std::uint32_t count) {
  // In 64 bits: a caller may have begun below 0.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  view = static_cast<std::int32_t>(std::min(std::int64_t{view} + count, kMost));
}

}  // namespace

Status ExpertBalancer::end_step() {
  if (memory_) {
    MOESAIC_RETURN_IF_ERROR(memory_->end_step());
    return update_view();
  }
  if (!record_) return {};
  for (std::size_t p = 0; p < load_view_.size(); ++p) {
    add_load(load_view_[p], static_cast<std::uint32_t>(step_load_[p]));
  }
  return window_->record(step_load_, maps_.physical_to_logical);
}

Status ExpertBalancer::update_view() {
  if (!memory_ || load_view_.empty()) return {};
  try {
    std::vector<std::uint32_t> now(seen_.size());
    MOESAIC_RETURN_IF_ERROR(memory_->total_load(now));
    for (std::size_t p = 0; p < now.size(); ++p) add_load(load_view_[p], now[p] - seen_[p]);
    seen_ = std::move(now);
    return {};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "cannot allocate the loads of slots"};
  }
}

Status ExpertBalancer::set_recording(bool record) {
  // Told in every step of a model (EplbStepper): the memory would wait for the calls before each time.
  if (record == record_ && !MOESAIC_FAULT(eplb_tells_the_memory_again)) return {};
  if (memory_) MOESAIC_RETURN_IF_ERROR(memory_->set_recording(record));
  record_ = record;
  return {};
}

Result<std::vector<double>> ExpertBalancer::load(Communicator* world, int replicas) {
  try {
    std::vector<double> counted;
    Status failed;
    if (memory_) {
      counted.resize(static_cast<std::size_t>(shape_.num_logical));
      failed = memory_->window_load(counted);
      if (failed.ok()) failed = update_view();
    }
    if (!failed.ok()) {
      // Of this rank alone: the others are told instead of waiting for it.
      if (world != nullptr) static_cast<void>(world->abandon(failed.message()));
      return failed;
    }
    const std::span<const double> mine =
        memory_ ? std::span<const double>(counted) : window_->load();
    if (world == nullptr) return std::vector<double>(mine.begin(), mine.end());
    const auto n = static_cast<std::size_t>(world->size());
    std::vector<std::vector<double>> all(n, std::vector<double>(mine.size()));
    const std::vector<std::span<const std::byte>> send(n, std::as_bytes(mine));
    std::vector<std::span<std::byte>> receive;
    receive.reserve(n);
    for (std::vector<double>& v : all) receive.push_back(std::as_writable_bytes(std::span(v)));
    MOESAIC_RETURN_IF_ERROR(world->exchange("load", send, receive));
    std::vector<double> sum(mine.size(), 0.0);
    for (const std::vector<double>& v : all) {
      for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += v[e];
    }
    // Whole numbers: ranks with the same rows have counted each of them.
    for (double& total : sum) total /= replicas;
    return sum;
  } catch (const std::bad_alloc&) {
    const Status none(StatusCode::kOutOfMemory, "cannot allocate the loads of all ranks");
    if (world != nullptr) static_cast<void>(world->abandon(none.message()));
    return none;
  }
}

}  // namespace moesaic::layer
