// A rearrangement of an ExpertBalancer: who sends what, what waits, and the switch.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/fault.h"
#include "core/refusal.h"
#include "layer/expert_balancer.h"

namespace moesaic::layer {
namespace {

std::size_t image_bytes(std::span<const ExpertPart> parts) {
  std::int64_t bytes = 0;
  for (const ExpertPart& part : parts) bytes += part.rows.dim(1);
  return static_cast<std::size_t>(bytes);
}

}  // namespace

Status ExpertBalancer::read_slot(std::span<const ExpertPart> parts, std::int64_t slot,
                                 std::byte* image) const {
  for (const ExpertPart& part : parts) {
    const std::int64_t bytes = part.rows.dim(1);
    if (memory_) {
      MOESAIC_RETURN_IF_ERROR(memory_->read(part, slot, image));
    } else {
      std::memcpy(image, part.rows.data + slot * bytes, static_cast<std::size_t>(bytes));
    }
    image += bytes;
  }
  return {};
}

Status ExpertBalancer::write_slot(std::span<const ExpertPart> parts, std::int64_t slot,
                                  const std::byte* image) {
  for (const ExpertPart& part : parts) {
    const std::int64_t bytes = part.rows.dim(1);
    if (memory_) {
      MOESAIC_RETURN_IF_ERROR(memory_->write(part, slot, image));
    } else {
      std::memcpy(part.rows.data + slot * bytes, image, static_cast<std::size_t>(bytes));
    }
    image += bytes;
  }
  return {};
}

Status ExpertBalancer::begin(std::span<const std::int32_t> wanted) {
  if (flight_) return invalid("rearrange: one is in flight, need to continue it to its end");
  if (wanted.size() != maps_.physical_to_logical.size()) {
    return invalid(fmt::format("wanted: got {} slots, need {}", wanted.size(),
                               maps_.physical_to_logical.size()));
  }
  try {
    auto flight = std::make_unique<Flight>();
    MOESAIC_ASSIGN_OR_RETURN(flight->maps, make_expert_maps(wanted, shape_.num_logical));
    MOESAIC_ASSIGN_OR_RETURN(flight->plan,
                             plan_transfers(maps_.physical_to_logical, wanted, shape_.ranks));
    flight_ = std::move(flight);
    return {};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "cannot allocate a rearrangement"};
  }
}

std::int64_t ExpertBalancer::slot_of(std::int32_t expert) const {
  const auto mine = local_experts();
  return std::find(mine.begin(), mine.end(), expert) - mine.begin();
}

Status ExpertBalancer::make_room(Communicator* world, std::span<const ExpertPart> parts) {
  Flight& f = *flight_;
  if (!memory_) return {};
  try {
    const auto each = static_cast<std::size_t>(shape_.num_physical / shape_.ranks);
    std::size_t most = 0;
    for (std::size_t r = 0; r < static_cast<std::size_t>(shape_.ranks); ++r) {
      std::vector<std::int32_t>& arriving = f.arriving.emplace_back();
      for (std::size_t s = r * each; s < (r + 1) * each; ++s) {
        const std::int32_t expert = f.maps.physical_to_logical[s];
        if (expert == maps_.physical_to_logical[s] ||
            std::find(arriving.begin(), arriving.end(), expert) != arriving.end()) {
          continue;
        }
        arriving.push_back(expert);
      }
      most = std::max(most, arriving.size());
    }
    if (most == 0) return {};
    retired_.reset();  // before ranks meet, so that none begins a call meanwhile
    Result<std::unique_ptr<SlotStage>> made = memory_->make_stage(
        world, static_cast<std::int64_t>(most), static_cast<std::int64_t>(image_bytes(parts)));
    if (made.ok()) {
      f.stage = std::move(*made);
    } else if (made.status().code() != StatusCode::kUnsupported &&
               made.status().code() != StatusCode::kOutOfMemory) {
      return made.status();
    }
    return {};
  } catch (const std::bad_alloc&) {
    Status failed(StatusCode::kOutOfMemory, "cannot allocate a rearrangement");
    // Of this rank alone: the others are told instead of waiting for it.
    if (world != nullptr) static_cast<void>(world->abandon(failed.message()));
    return failed;
  }
}

std::size_t ExpertBalancer::next_end(std::int64_t max_transfers) const {
  const Flight& f = *flight_;
  return std::min(f.plan.size(),
                  f.next + static_cast<std::size_t>(std::max<std::int64_t>(max_transfers, 1)));
}

namespace {

std::int64_t place_of(const std::vector<std::int32_t>& arriving, std::int32_t expert) {
  return std::find(arriving.begin(), arriving.end(), expert) - arriving.begin();
}

}  // namespace

Status ExpertBalancer::send_some(std::int64_t max_transfers, std::span<const ExpertPart> parts) {
  Flight& f = *flight_;
  for (const std::size_t end = next_end(max_transfers); f.next < end; ++f.next) {
    const ExpertTransfer& t = f.plan[f.next];
    if (t.from != shape_.rank) continue;
    MOESAIC_RETURN_IF_ERROR(
        f.stage->send(parts, slot_of(t.expert), t.to,
                      place_of(f.arriving[static_cast<std::size_t>(t.to)], t.expert)));
  }
  return {};
}

Status ExpertBalancer::move_some(Communicator& world, std::int64_t max_transfers,
                                 std::span<const ExpertPart> parts) {
  Flight& f = *flight_;
  const std::size_t end = next_end(max_transfers);
  const auto n = static_cast<std::size_t>(shape_.ranks);
  const std::size_t bytes = image_bytes(parts);
  std::vector<std::vector<std::byte>> out(n), in(n);
  for (std::size_t i = f.next; i < end; ++i) {
    const ExpertTransfer& t = f.plan[i];
    if (t.from == shape_.rank) {
      std::vector<std::byte>& message = out[static_cast<std::size_t>(t.to)];
      message.resize(message.size() + bytes);
      MOESAIC_RETURN_IF_ERROR(
          read_slot(parts, slot_of(t.expert), message.data() + message.size() - bytes));
    }
    if (t.to == shape_.rank) {
      std::vector<std::byte>& message = in[static_cast<std::size_t>(t.from)];
      message.resize(message.size() + bytes);
    }
  }
  const std::vector<std::span<const std::byte>> send(out.begin(), out.end());
  const std::vector<std::span<std::byte>> receive(in.begin(), in.end());
  MOESAIC_RETURN_IF_ERROR(world.exchange("rearrange", send, receive));

  std::vector<std::size_t> read(n, 0);
  for (; f.next < end; ++f.next) {
    const ExpertTransfer& t = f.plan[f.next];
    if (t.to != shape_.rank) continue;
    const auto from = static_cast<std::size_t>(t.from);
    const std::byte* const image = in[from].data() + bytes * read[from]++;
    f.images[t.expert].assign(image, image + bytes);
  }
  return {};
}

// What changes its slot inside this rank goes through the buffer too: its old slot may be one that
// is written first.
Status ExpertBalancer::stage_local(std::span<const ExpertPart> parts) {
  Flight& f = *flight_;
  const auto before = local_experts();
  if (f.stage) {
    const std::vector<std::int32_t>& arriving = f.arriving[static_cast<std::size_t>(shape_.rank)];
    for (std::size_t place = 0; place < arriving.size(); ++place) {
      // What another rank sends has no slot here yet.
      if (std::find(before.begin(), before.end(), arriving[place]) == before.end()) continue;
      MOESAIC_RETURN_IF_ERROR(f.stage->send(parts, slot_of(arriving[place]), shape_.rank,
                                            static_cast<std::int64_t>(place)));
    }
    f.staged = true;
    return {};
  }
  const auto after = local_part(f.maps.physical_to_logical);
  for (std::size_t s = 0; s < after.size(); ++s) {
    if (after[s] == before[s] || f.images.contains(after[s])) continue;
    std::vector<std::byte> image(image_bytes(parts));
    MOESAIC_RETURN_IF_ERROR(read_slot(parts, slot_of(after[s]), image.data()));
    f.images.emplace(after[s], std::move(image));
  }
  f.staged = true;
  return {};
}

std::int64_t ExpertBalancer::get_ready(std::span<const ExpertPart> parts, Status& failed) {
  Flight& f = *flight_;
  if (f.next < f.plan.size()) return 0;
  try {
    const bool was_staged = f.staged;
    if (!f.staged) failed = stage_local(parts);
    if (failed.ok() && f.stage) {
      // Copies that were begun in this call have the time until the next.
      if (!was_staged) return 0;
      if (!MOESAIC_FAULT(rearrange_does_not_settle)) failed = f.stage->settle();
    }
  } catch (const std::bad_alloc&) {
    failed = {StatusCode::kOutOfMemory, "rearrange: cannot allocate the experts that move"};
  }
  return failed.ok() ? 1 : -1;
}

Status ExpertBalancer::agree_on_transfers(Communicator& world, std::int64_t max_transfers) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> all,
                           world.all_gather("max_transfers", max_transfers));
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] == all[0] || MOESAIC_FAULT(rearrange_ranks_may_move_unequally)) continue;
    return invalid(fmt::format("max_transfers: got {} on rank 0 and {} on rank {}, need the same",
                               all[0], all[r], r));
  }
  return {};
}

Result<bool> ExpertBalancer::advance(Communicator* world, std::int64_t max_transfers,
                                     std::span<const ExpertPart> parts) {
  if (!flight_) return Status(invalid("rearrange: none is in flight, need to begin one"));
  const auto give_up = [this](Status status) {
    end_flight();
    return status;
  };
  try {
    Flight& f = *flight_;
    if (world != nullptr && !f.agreed) {
      const Status agreed = agree_on_transfers(*world, max_transfers);
      if (!agreed.ok()) return give_up(agreed);
    }
    f.agreed = true;
    if (f.next < f.plan.size()) {
      const Status moved =
          f.stage ? send_some(max_transfers, parts) : move_some(*world, max_transfers, parts);
      if (!moved.ok()) {
        // A failure of this rank alone: the others are told instead of waiting for it.
        if (world->state().ok()) static_cast<void>(world->abandon(moved.message()));
        return give_up(moved);
      }
    }
    // With more of the plan to come no rank is ready, and a failure has been told: in steps of a model
    // that have no other reason to, ranks would only wait for each other.
    if (f.stage && f.next < f.plan.size()) return false;
    // -1: has failed, 0: not yet, 1: ready. All ranks see the same answers.
    Status failed;
    std::int64_t ready = get_ready(parts, failed);
    if (world != nullptr) {
      const auto all = world->all_gather("rearrange ready", ready);
      if (!all.ok()) return give_up(all.status());
      if (failed.ok() && std::count(all->begin(), all->end(), -1) > 0) {
        failed = {StatusCode::kDevice, "rearrange: another rank cannot read or hold its experts"};
      }
      if (std::count(all->begin(), all->end(), 1) != std::ssize(*all)) ready = 0;
    }
    if (!failed.ok()) return give_up(failed);
    if (ready == 1) {
      const Status switched = switch_over(parts);
      if (!switched.ok()) {
        if (world != nullptr) static_cast<void>(world->abandon(switched.message()));
        return give_up(switched);
      }
      const bool staged = f.stage != nullptr;
      flight_.reset();
      // Nobody begins a call before all have let go of the memory of the stage (end_flight).
      if (staged && world != nullptr) static_cast<void>(world->barrier("rearranged"));
    }
    return ready == 1;
  } catch (const std::exception& error) {
    if (world != nullptr && world->state().ok()) static_cast<void>(world->abandon(error.what()));
    return give_up({StatusCode::kOutOfMemory, fmt::format("rearrange: {}", error.what())});
  }
}

Status ExpertBalancer::switch_over(std::span<const ExpertPart> parts) {
  Flight& f = *flight_;
  const auto before = local_experts();
  const auto after = local_part(f.maps.physical_to_logical);
  for (std::size_t s = 0; s < after.size(); ++s) {
    if (after[s] == before[s] || MOESAIC_FAULT(rearrange_keeps_old_weights)) continue;
    const auto slot = static_cast<std::int64_t>(s);
    if (f.stage) {
      MOESAIC_RETURN_IF_ERROR(f.stage->take(
          parts, place_of(f.arriving[static_cast<std::size_t>(shape_.rank)], after[s]), slot));
      continue;
    }
    MOESAIC_RETURN_IF_ERROR(write_slot(parts, slot, f.images.find(after[s])->second.data()));
  }
  if (f.stage) MOESAIC_RETURN_IF_ERROR(f.stage->settle());
  if (!MOESAIC_FAULT(rearrange_keeps_old_maps)) {
    if (memory_) MOESAIC_RETURN_IF_ERROR(memory_->set_maps(f.maps));
    maps_ = std::move(f.maps);
  }
  return {};
}

}  // namespace moesaic::layer
