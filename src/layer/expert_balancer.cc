#include "layer/expert_balancer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "core/fault.h"
#include "core/refusal.h"
#include "router/eplb_map.h"

namespace moesaic::layer {
Result<std::unique_ptr<ExpertBalancer>> ExpertBalancer::create(std::int64_t num_logical,
                                                               std::int64_t num_physical, int ranks,
                                                               int rank, std::int64_t window) {
  if (num_physical % ranks != 0) {
    return invalid(
        fmt::format("num_redundant_experts: got {} for {} experts, need a sum that is a "
                    "multiple of the {} ranks",
                    num_physical - num_logical, num_logical, ranks));
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int32_t> initial,
                           initial_physical_to_logical(num_logical, num_physical));
  try {
    std::unique_ptr<ExpertBalancer> b(new ExpertBalancer);
    b->num_logical_ = num_logical;
    b->slots_per_rank_ = num_physical / ranks;
    b->rank_ = rank;
    b->ranks_ = ranks;
    MOESAIC_ASSIGN_OR_RETURN(b->maps_, make_expert_maps(initial, num_logical));
    b->step_load_.assign(initial.size(), 0);
    MOESAIC_ASSIGN_OR_RETURN(LoadWindow made, LoadWindow::create(num_logical, window));
    b->window_ = std::make_unique<LoadWindow>(std::move(made));
    return b;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate the maps of experts");
  }
}

std::span<const std::int32_t> ExpertBalancer::local_experts() const {
  return std::span(maps_.physical_to_logical)
      .subspan(static_cast<std::size_t>(rank_ * slots_per_rank_),
               static_cast<std::size_t>(slots_per_rank_));
}

Status ExpertBalancer::map_ids(std::int32_t* ids, std::int64_t tokens, std::int64_t k) {
  EplbState state;
  state.logical_to_physical = maps_.logical_to_physical;
  state.replica_count = maps_.replica_count;
  state.load = step_load_;
  state.max_replicas = maps_.max_replicas;
  state.record = true;
  MOESAIC_RETURN_IF_ERROR(router::check_eplb_state(state, num_logical_));
  router::map_logical_to_physical(state, num_logical_, tokens, k, nullptr, ids);
  return {};
}

Status ExpertBalancer::end_step() {
  MOESAIC_RETURN_IF_ERROR(window_->record(step_load_, maps_.physical_to_logical));
  std::fill(step_load_.begin(), step_load_.end(), 0);
  return {};
}

Result<std::vector<double>> ExpertBalancer::load(Communicator& world, int replicas) const {
  const std::span<const double> mine = window_->load();
  try {
    const auto n = static_cast<std::size_t>(world.size());
    std::vector<std::vector<double>> all(n, std::vector<double>(mine.size()));
    const std::vector<std::span<const std::byte>> send(n, std::as_bytes(mine));
    std::vector<std::span<std::byte>> receive;
    receive.reserve(n);
    for (std::vector<double>& v : all) receive.push_back(std::as_writable_bytes(std::span(v)));
    MOESAIC_RETURN_IF_ERROR(world.exchange("load", send, receive));
    std::vector<double> sum(mine.size(), 0.0);
    for (const std::vector<double>& v : all) {
      for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += v[e] / replicas;
    }
    return sum;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate the loads of all ranks");
  }
}

Status ExpertBalancer::begin(std::span<const std::int32_t> wanted) {
  if (flight_) return invalid("rearrange: one is in flight, need to continue it to its end");
  if (wanted.size() != maps_.physical_to_logical.size()) {
    return invalid(fmt::format("wanted: got {} slots, need {}", wanted.size(),
                               maps_.physical_to_logical.size()));
  }
  try {
    auto flight = std::make_unique<Flight>();
    MOESAIC_ASSIGN_OR_RETURN(flight->maps, make_expert_maps(wanted, num_logical_));
    MOESAIC_ASSIGN_OR_RETURN(flight->plan,
                             plan_transfers(maps_.physical_to_logical, wanted, ranks_));
    const auto before = local_experts();
    const auto after = wanted.subspan(static_cast<std::size_t>(rank_ * slots_per_rank_),
                                      static_cast<std::size_t>(slots_per_rank_));
    flight->slots.resize(after.size());
    for (std::size_t s = 0; s < after.size(); ++s) {
      const auto found = std::find(before.begin(), before.end(), after[s]);
      if (found == before.end()) continue;
      flight->slots[s] = store_->slots()[static_cast<std::size_t>(found - before.begin())];
    }
    flight_ = std::move(flight);
    return {};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "cannot allocate a rearrangement"};
  }
}

const StoredExpert& ExpertBalancer::held(std::int32_t expert) const {
  const auto mine = local_experts();
  const auto found = std::find(mine.begin(), mine.end(), expert);
  return *store_->slots()[static_cast<std::size_t>(found - mine.begin())];
}

Status ExpertBalancer::move_some(Communicator& world, std::int64_t max_transfers) {
  Flight& f = *flight_;
  const std::size_t end = std::min(
      f.plan.size(), f.next + static_cast<std::size_t>(std::max<std::int64_t>(max_transfers, 1)));
  const auto n = static_cast<std::size_t>(ranks_);
  const StoredExpert& like = *store_->slots().front();
  const auto bytes = static_cast<std::size_t>(like.bytes());
  std::vector<std::vector<std::byte>> out(n), in(n);
  for (std::size_t i = f.next; i < end; ++i) {
    const ExpertTransfer& t = f.plan[i];
    if (t.from == rank_) {
      std::vector<std::byte>& message = out[static_cast<std::size_t>(t.to)];
      message.resize(message.size() + bytes);
      held(t.expert).write_to(message.data() + message.size() - bytes);
    }
    if (t.to == rank_) {
      std::vector<std::byte>& message = in[static_cast<std::size_t>(t.from)];
      message.resize(message.size() + bytes);
    }
  }
  const std::vector<std::span<const std::byte>> send(out.begin(), out.end());
  const std::vector<std::span<std::byte>> receive(in.begin(), in.end());
  MOESAIC_RETURN_IF_ERROR(world.exchange("rearrange", send, receive));

  const auto wanted =
      std::span(f.maps.physical_to_logical)
          .subspan(static_cast<std::size_t>(rank_ * slots_per_rank_), f.slots.size());
  std::vector<std::size_t> read(n, 0);
  for (; f.next < end; ++f.next) {
    const ExpertTransfer& t = f.plan[f.next];
    if (t.to != rank_) continue;
    MOESAIC_ASSIGN_OR_RETURN(auto expert, StoredExpert::allocate_like(like));
    const auto from = static_cast<std::size_t>(t.from);
    expert->read_from(in[from].data() + bytes * read[from]++);
    // All slots that want it share it.
    for (std::size_t s = 0; s < f.slots.size(); ++s) {
      if (wanted[s] == t.expert) f.slots[s] = expert;
    }
  }
  return {};
}

Result<bool> ExpertBalancer::advance(Communicator& world, std::int64_t max_transfers,
                                     const BuildFn& build) {
  if (!flight_) return Status(invalid("rearrange: none is in flight, need to begin one"));
  const auto give_up = [this](Status status) {
    flight_.reset();
    return status;
  };
  try {
    Flight& f = *flight_;
    if (f.next < f.plan.size()) {
      const Status moved = move_some(world, max_transfers);
      if (!moved.ok()) {
        // A failure of this rank alone: the others are told instead of waiting for it.
        if (world.state().ok()) static_cast<void>(world.abandon(moved.message()));
        return give_up(moved);
      }
    }
    if (f.next == f.plan.size() && !f.store) {
      if (MOESAIC_FAULT(rearrange_keeps_old_weights)) f.slots = store_->slots();
      f.store = std::make_unique<ExpertStore>(f.slots);
      f.building = std::async(std::launch::async, [&f, build] { return build(*f.store); });
    }
    // -1: could not be built, 0: not yet, 1: ready. All ranks see the same answers.
    std::int64_t ready = 0;
    Status failed;
    if (f.built) ready = 1;
    if (f.building.valid() &&
        f.building.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
      Result<std::unique_ptr<Experts>> made = f.building.get();
      ready = made.ok() ? 1 : -1;
      failed = made.ok() ? Status() : made.status();
      if (made.ok()) f.built = std::move(made).value();
    }
    const auto all = world.all_gather("rearrange ready", ready);
    if (!all.ok()) return give_up(all.status());
    if (!failed.ok()) return give_up(failed);
    if (std::count(all->begin(), all->end(), -1) > 0) {
      return give_up(
          {StatusCode::kDevice, "rearrange: another rank could not build its new weights"});
    }
    return std::count(all->begin(), all->end(), 1) == std::ssize(*all);
  } catch (const std::exception& error) {
    return give_up({StatusCode::kOutOfMemory, fmt::format("rearrange: {}", error.what())});
  }
}

void ExpertBalancer::switch_maps() {
  if (!MOESAIC_FAULT(rearrange_keeps_old_maps)) maps_ = std::move(flight_->maps);
  store_ = std::move(flight_->store);
  flight_.reset();
}

}  // namespace moesaic::layer
