// Messages that lie in device memory, through any communicator: NCCL moves them from device to
// device, all others through host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

class DeviceMessages {
 public:
  //   device  where the messages lie. kInvalidArgument when the communicator moves another one's.
  static Result<DeviceMessages> create(std::shared_ptr<Communicator> communicator, int device);

  // As Communicator::exchange. What was put on `stream` before has happened when it reads; the
  // messages are there on return. Waits on the host; not capturable.
  Status exchange(void* stream, std::string_view what,
                  std::span<const std::span<const std::byte>> send,
                  std::span<const std::span<std::byte>> recv,
                  std::span<std::int64_t> received = {}) const;

  Communicator& communicator() const { return *communicator_; }
  int size() const { return communicator_->size(); }
  int rank() const { return communicator_->rank(); }
  bool through_host() const { return communicator_->device() < 0; }

 private:
  // Host copies of the messages of a call, kept for the next one: a communicator takes one call at
  // a time.
  struct Staging {
    std::vector<std::vector<std::byte>> out, in;
  };
  Status stage(void* stream, std::string_view what,
               std::span<const std::span<const std::byte>> send,
               std::span<const std::span<std::byte>> recv, std::span<std::int64_t> received) const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Staging> staging_;
};

// Sums and copies between ranks that have the same rows (tensor parallelism).
class DeviceReplicas {
 public:
  //   most_bytes  of values that one reduction may have
  static Result<DeviceReplicas> create(std::shared_ptr<Communicator> communicator, int device,
                                       std::int64_t most_bytes);

  // values[i] = sum over the ranks in rank order in fp32: the bits of Communicator::all_reduce_sum.
  // bf16 values: each sum is rounded, which changes nothing where all but one are zero.
  Status all_reduce_sum(void* stream, void* values, std::int64_t count, bool bf16) const;
  // Every rank has written its stretch [first[r], first[r + 1]) bytes of `data`; fills in the
  // others'. first has size + 1 entries.
  Status gather(void* stream, std::byte* data, std::span<const std::int64_t> first) const;

  std::int64_t bytes() const;

 private:
  struct Buffers;
  explicit DeviceReplicas(DeviceMessages messages) : messages_(std::move(messages)) {}
  DeviceMessages messages_;
  std::shared_ptr<Buffers> buffers_;
};

}  // namespace moesaic::cuda
