#include "layer/sm90/device_balance.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <vector>

#include "core/arena.h"
#include "core/checked.h"
#include "core/refusal.h"
#include "layer/sm90/device_stage.h"

namespace moesaic::cuda {
namespace {

constexpr std::int64_t kMostSteps = std::int64_t{1} << 24;

cudaStream_t stream_of(const SideStream& side) { return static_cast<cudaStream_t>(side.handle()); }

}  // namespace

DeviceBalance::~DeviceBalance() = default;

Result<std::unique_ptr<DeviceBalance>> DeviceBalance::create(int device, std::int64_t num_logical,
                                                             std::int64_t num_physical,
                                                             std::int64_t window) {
  if (window < 1 || window > kMostSteps) {
    return invalid(
        fmt::format("eplb_window: got {}, need 1 to {} steps on a GPU", window, kMostSteps));
  }
  std::unique_ptr<DeviceBalance> made(new (std::nothrow) DeviceBalance());
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  made->device_ = device;
  BalanceState& s = made->state_;
  s.num_logical = static_cast<std::int32_t>(num_logical);
  s.num_physical = static_cast<std::int32_t>(num_physical);
  s.window = static_cast<std::int32_t>(window);
  const auto carve = [&](Arena& arena) {
    s.header = arena.take<BalanceHeader>(1);
    s.first = arena.take<std::int32_t>(num_logical + 1);
    s.slots = arena.take<std::int32_t>(num_physical);
    s.expert = arena.take<std::int32_t>(num_physical);
    s.step = arena.take<std::uint32_t>(num_physical);
    s.total = arena.take<std::uint32_t>(num_physical);
    s.ring = arena.take<std::uint32_t>(window * num_logical);
  };
  Arena measure = Arena::measure();
  carve(measure);
  MOESAIC_RETURN_IF_ERROR(measure.status());
  const std::int64_t bytes = measure.used();
  MOESAIC_RETURN_IF_ERROR(made->memory_.reserve("loads of experts", bytes));
  MOESAIC_RETURN_IF_ERROR(
      fill_zero("loads of experts", made->memory_.as<std::byte>(), bytes, nullptr));
  MOESAIC_RETURN_IF_ERROR(synchronize(nullptr));
  Arena arena({made->memory_.as<std::byte>(), static_cast<std::size_t>(bytes)});
  carve(arena);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  MOESAIC_RETURN_IF_ERROR(made->side_.create());
  MOESAIC_RETURN_IF_ERROR(made->called_.create());
  MOESAIC_RETURN_IF_ERROR(made->set_recording(true));
  return made;
}

Status DeviceBalance::map(void* stream, const std::int32_t* ids, std::int64_t count,
                          std::int32_t* mapped) const {
  return check_call("load balancing", launch_balance_ids(state_, ids, count, mapped, stream));
}

Status DeviceBalance::end_call(void* stream) {
  MOESAIC_RETURN_IF_ERROR(check_call("load balancing", launch_balance_step(state_, stream)));
  return called_.end(stream);
}

Status DeviceBalance::after_calls() { return after_calls(side_.handle()); }
Status DeviceBalance::after_calls(void* stream) { return called_.before(stream); }

Status DeviceBalance::copy(const char* what, void* to, const void* from, std::int64_t bytes) {
  MOESAIC_RETURN_IF_ERROR(
      check_call(what, cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault,
                                       stream_of(side_))));
  return synchronize(side_.handle());
}

Status DeviceBalance::read(const ExpertPart& part, std::int64_t slot, std::byte* to) {
  const DeviceScope scope(device_);
  const std::int64_t bytes = part.rows.dim(1);
  return copy("experts that move", to, part.rows.data + slot * bytes, bytes);
}

Status DeviceBalance::write(const ExpertPart& part, std::int64_t slot, const std::byte* from) {
  const DeviceScope scope(device_);
  const std::int64_t bytes = part.rows.dim(1);
  MOESAIC_RETURN_IF_ERROR(after_calls());
  return copy("experts that move", part.rows.data + slot * bytes, from, bytes);
}

Result<std::unique_ptr<layer::SlotStage>> DeviceBalance::make_stage(Communicator* world,
                                                                    std::int64_t places,
                                                                    std::int64_t bytes) {
  if (world != nullptr && !peers_write_) {
    return Status(unsupported("experts that move: got ranks that send messages"));
  }
  MOESAIC_ASSIGN_OR_RETURN(
      std::unique_ptr<DeviceStage> made,
      DeviceStage::create(device_, world, places, bytes, peer_memory_,
                          [this](void* stream) { return after_calls(stream); }));
  return std::unique_ptr<layer::SlotStage>(std::move(made));
}

Status DeviceBalance::set_maps(const ExpertMaps& maps) {
  const DeviceScope scope(device_);
  const auto logical = static_cast<std::size_t>(state_.num_logical);
  try {
    std::vector<std::int32_t> first(logical + 1, 0), slots;
    for (std::size_t e = 0; e < logical; ++e) {
      const auto row =
          maps.logical_to_physical.begin() + static_cast<std::ptrdiff_t>(e) * maps.max_replicas;
      slots.insert(slots.end(), row, row + maps.replica_count[e]);
      first[e + 1] = static_cast<std::int32_t>(slots.size());
    }
    MOESAIC_RETURN_IF_ERROR(after_calls());
    MOESAIC_RETURN_IF_ERROR(
        copy("maps of experts", state_.first, first.data(), std::ssize(first) * 4));
    MOESAIC_RETURN_IF_ERROR(
        copy("maps of experts", state_.slots, slots.data(), std::ssize(slots) * 4));
    return copy("maps of experts", state_.expert, maps.physical_to_logical.data(),
                std::ssize(maps.physical_to_logical) * 4);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "cannot allocate the maps of experts"};
  }
}

Status DeviceBalance::set_recording(bool record) {
  const DeviceScope scope(device_);
  const std::int32_t value = record ? 1 : 0;
  MOESAIC_RETURN_IF_ERROR(after_calls());
  return copy("recording", &state_.header->record, &value, 4);
}

Status DeviceBalance::end_step() {
  const DeviceScope scope(device_);
  MOESAIC_RETURN_IF_ERROR(after_calls());
  MOESAIC_RETURN_IF_ERROR(
      check_call("load balancing", launch_balance_step(state_, side_.handle())));
  return synchronize(side_.handle());
}

Status DeviceBalance::window_load(std::span<double> load) {
  const DeviceScope scope(device_);
  try {
    std::vector<std::uint32_t> ring(static_cast<std::size_t>(state_.window) * load.size());
    MOESAIC_RETURN_IF_ERROR(after_calls());
    MOESAIC_RETURN_IF_ERROR(
        copy("loads of experts", ring.data(), state_.ring, std::ssize(ring) * 4));
    std::fill(load.begin(), load.end(), 0.0);
    for (std::size_t i = 0; i < ring.size(); ++i) load[i % load.size()] += ring[i];
    return {};
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, "cannot allocate the loads of experts"};
  }
}

Status DeviceBalance::total_load(std::span<std::uint32_t> load) {
  const DeviceScope scope(device_);
  MOESAIC_RETURN_IF_ERROR(after_calls());
  return copy("loads of experts", load.data(), state_.total, std::ssize(load) * 4);
}

}  // namespace moesaic::cuda
