// Experts that move between GPUs of one host: by copies from a slot of one rank straight into memory of
// the rank that will have them, beside the calls, and from there into the slot when all switch.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "cuda/device_memory.h"
#include "cuda/side_stream.h"
#include "layer/slot_memory.h"
#include "parallel/peer_window.h"

namespace moesaic::cuda {

class DeviceStage final : public layer::SlotStage {
 public:
  // SlotMemory::make_stage on `device`. after_calls: what is put on a stream from now on comes after the
  // calls so far.
  using AfterCalls = std::function<Status(void* stream)>;
  static Result<std::unique_ptr<DeviceStage>> create(int device, Communicator* world,
                                                     std::int64_t places, std::int64_t bytes,
                                                     PeerMemory memory, AfterCalls after_calls);
  ~DeviceStage() override;
  DeviceStage(const DeviceStage&) = delete;
  DeviceStage& operator=(const DeviceStage&) = delete;

  Status send(std::span<const ExpertPart> parts, std::int64_t slot, int to,
              std::int64_t place) override;
  Status settle() override;
  Status take(std::span<const ExpertPart> parts, std::int64_t place, std::int64_t slot) override;

 private:
  DeviceStage(int device, std::int64_t bytes, AfterCalls after_calls)
      : device_(device), bytes_(bytes), after_calls_(std::move(after_calls)) {}
  std::byte* place_of(int rank, std::int64_t place) const;

  int device_;
  std::int64_t bytes_;  // of a place
  AfterCalls after_calls_;
  SideStream copies_;
  std::unique_ptr<parallel::PeerWindow> windows_;  // or, of one rank alone:
  Allocation memory_;
};

}  // namespace moesaic::cuda
