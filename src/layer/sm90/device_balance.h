// Expert load balancing of a layer on a GPU: maps and counters in its memory, slots read and written
// by copies beside the calls.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "cuda/device_memory.h"
#include "cuda/last_call.h"
#include "cuda/side_stream.h"
#include "layer/slot_memory.h"
#include "layer/sm90/balance_ops.h"
#include "moesaic/communicator.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

class DeviceBalance final : public layer::SlotMemory {
 public:
  // On the current device, without maps. kOutOfMemory, kInvalidArgument (a window that is no number
  // of steps), kDevice.
  static Result<std::unique_ptr<DeviceBalance>> create(int device, std::int64_t num_logical,
                                                       std::int64_t num_physical,
                                                       std::int64_t window);
  ~DeviceBalance() override;
  DeviceBalance(const DeviceBalance&) = delete;
  DeviceBalance& operator=(const DeviceBalance&) = delete;

  // In a call: slots [count] of logical ids, of which some may be -1.
  Status map(void* stream, const std::int32_t* ids, std::int64_t count, std::int32_t* mapped) const;
  // After the last rows of a call of streams.
  Status end_call(void* stream);

  Status read(const ExpertPart& part, std::int64_t slot, std::byte* to) override;
  Status write(const ExpertPart& part, std::int64_t slot, const std::byte* from) override;
  Status set_maps(const ExpertMaps& maps) override;
  Status set_recording(bool record) override;
  Status end_step() override;
  Status window_load(std::span<double> load) override;
  Status total_load(std::span<std::uint32_t> load) override;
  std::int64_t bytes() const override { return memory_.bytes(); }
  Result<std::unique_ptr<layer::SlotStage>> make_stage(Communicator* world, std::int64_t places,
                                                       std::int64_t bytes) override;
  // Whether ranks write into each other's memory; else make_stage is for one rank alone.
  void let_peers_write(PeerMemory memory) {
    peers_write_ = true;
    peer_memory_ = memory;
  }

 private:
  DeviceBalance() = default;
  // What is put on the side stream from now on comes after the calls so far.
  Status after_calls();
  Status after_calls(void* stream);
  Status copy(const char* what, void* to, const void* from, std::int64_t bytes);

  int device_ = 0;
  BalanceState state_;
  Allocation memory_;  // of state_
  SideStream side_;
  LastCall called_;
  bool peers_write_ = false;
  PeerMemory peer_memory_ = {};  // of the windows that they write through
};

}  // namespace moesaic::cuda
