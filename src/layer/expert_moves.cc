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

Status ExpertBalancer::move_some(Communicator& world, std::int64_t max_transfers,
                                 std::span<const ExpertPart> parts) {
  Flight& f = *flight_;
  const std::size_t end = std::min(
      f.plan.size(), f.next + static_cast<std::size_t>(std::max<std::int64_t>(max_transfers, 1)));
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

Result<bool> ExpertBalancer::advance(Communicator* world, std::int64_t max_transfers,
                                     std::span<const ExpertPart> parts) {
  if (!flight_) return Status(invalid("rearrange: none is in flight, need to begin one"));
  const auto give_up = [this](Status status) {
    flight_.reset();
    return status;
  };
  try {
    Flight& f = *flight_;
    if (f.next < f.plan.size()) {
      const Status moved = move_some(*world, max_transfers, parts);
      if (!moved.ok()) {
        // A failure of this rank alone: the others are told instead of waiting for it.
        if (world->state().ok()) static_cast<void>(world->abandon(moved.message()));
        return give_up(moved);
      }
    }
    // -1: has failed, 0: not yet, 1: ready. All ranks see the same answers.
    std::int64_t ready = 0;
    Status failed;
    if (f.next == f.plan.size()) {
      ready = 1;
      try {
        if (!f.staged) failed = stage_local(parts);
        if (!failed.ok()) ready = -1;
      } catch (const std::bad_alloc&) {
        ready = -1;
        failed = {StatusCode::kOutOfMemory, "rearrange: cannot allocate the experts that move"};
      }
    }
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
    MOESAIC_RETURN_IF_ERROR(
        write_slot(parts, static_cast<std::int64_t>(s), f.images.find(after[s])->second.data()));
  }
  if (!MOESAIC_FAULT(rearrange_keeps_old_maps)) {
    if (memory_) MOESAIC_RETURN_IF_ERROR(memory_->set_maps(f.maps));
    maps_ = std::move(f.maps);
  }
  flight_.reset();
  return {};
}

}  // namespace moesaic::layer
