#include "layer/sm90/device_stage.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <utility>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"

namespace moesaic::cuda {
namespace {

// Of the free memory, what experts on their way may take: the rest is for others in the process.
constexpr std::int64_t kShareOfFree = 4;

Status there_is_room(std::int64_t bytes) {
  std::size_t free = 0, all = 0;
  MOESAIC_RETURN_IF_ERROR(check_call("experts that move", cudaMemGetInfo(&free, &all)));
  if (bytes <= static_cast<std::int64_t>(free) / kShareOfFree) return {};
  return unsupported(fmt::format("experts that move: got {} bytes of free device memory, need {}",
                                 free, bytes * kShareOfFree));
}

}  // namespace

DeviceStage::~DeviceStage() {
  const DeviceScope scope(device_);
  static_cast<void>(settle());  // nothing is written to memory that is let go of
  windows_.reset();
}

Result<std::unique_ptr<DeviceStage>> DeviceStage::create(int device, Communicator* world,
                                                         std::int64_t places, std::int64_t bytes,
                                                         PeerMemory memory,
                                                         AfterCalls after_calls) {
  const DeviceScope scope(device);
  // Where this throws the caller tells the other ranks.
  std::unique_ptr<DeviceStage> made(new DeviceStage(device, bytes, std::move(after_calls)));
  const std::int64_t all = checked_mul(places, bytes).value_or(0);
  Status mine = scope.status();
  if (mine.ok() && all == 0) mine = unsupported("experts that move: got more than 2^63 - 1 bytes");
  if (mine.ok()) mine = there_is_room(all);
  if (mine.ok()) mine = made->copies_.create();
  if (world == nullptr) {
    MOESAIC_RETURN_IF_ERROR(mine);
    MOESAIC_RETURN_IF_ERROR(made->memory_.reserve("experts that move", all));
    return made;
  }
  MOESAIC_ASSIGN_OR_RETURN(made->windows_,
                           parallel::make_peer_window(*world, device, all, mine, memory));
  return made;
}

std::byte* DeviceStage::place_of(int rank, std::int64_t place) const {
  return (windows_ ? windows_->base(rank) : memory_.as<std::byte>()) + place * bytes_;
}

Status DeviceStage::send(std::span<const ExpertPart> parts, std::int64_t slot, int to,
                         std::int64_t place) {
  if (MOESAIC_FAULT(cuda_stage_first_place_for_all)) place = 0;
  const DeviceScope scope(device_);
  std::byte* there = place_of(to, place);
  for (const ExpertPart& part : parts) {
    const std::int64_t bytes = part.rows.dim(1);
    MOESAIC_RETURN_IF_ERROR(copy_on_device("experts that move", there,
                                           part.rows.data + slot * bytes, bytes, copies_.handle()));
    there += bytes;
  }
  return {};
}

Status DeviceStage::settle() {
  const DeviceScope scope(device_);
  return synchronize(copies_.handle());
}

Status DeviceStage::take(std::span<const ExpertPart> parts, std::int64_t place, std::int64_t slot) {
  const DeviceScope scope(device_);
  MOESAIC_RETURN_IF_ERROR(after_calls_(copies_.handle()));
  const std::byte* here = place_of(windows_ ? windows_->rank() : 0, place);
  for (const ExpertPart& part : parts) {
    const std::int64_t bytes = part.rows.dim(1);
    MOESAIC_RETURN_IF_ERROR(copy_on_device("experts that move", part.rows.data + slot * bytes, here,
                                           bytes, copies_.handle()));
    here += bytes;
  }
  return {};
}

}  // namespace moesaic::cuda
