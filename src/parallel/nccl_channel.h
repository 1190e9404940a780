// A stream, an event and the NCCL communicator of one rank, on its device. Every wait ends in time.
#pragma once

#include <cuda_runtime.h>

#include <chrono>

#include "moesaic/status.h"
#include "parallel/nccl_library.h"

namespace moesaic::parallel {

class NcclChannel {
 public:
  using Clock = std::chrono::steady_clock;

  NcclChannel(const NcclLibrary& nccl, int device) : nccl_(nccl), device_(device) {}
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;
  ~NcclChannel();

  // Collective: joins the communicator of `ranks` ranks and connects to each of them. The
  // communicator is one whose calls block: a call of one that does not costs a thread, 90 us for
  // the smallest message. What could wait for a peer for ever, joining and connecting, is therefore
  // done here by a thread that is left behind at the deadline; later calls only launch. kNone: this
  // communicator is not for messages, and connects to nobody.
  enum class Messages : bool { kNone, kToAll };
  Status start(int ranks, const NcclUniqueId& id, int rank, Clock::time_point deadline,
               Messages messages = Messages::kToAll);

  cudaStream_t stream() const { return stream_; }
  void* comm() const { return comm_; }

  // Waits for the stream; an error of a peer or the deadline ends it.
  Status wait(const char* what, Clock::time_point deadline);
  // Ends what is running on the device, so that freeing its buffers waits for nobody.
  void abort();

 private:
  const NcclLibrary& nccl_;
  int device_;
  void* comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

}  // namespace moesaic::parallel
