// Memory of all ranks of a communicator of NCCL as this rank's kernels address it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "moesaic/status.h"
#include "parallel/nccl_channel.h"
#include "parallel/nccl_library.h"
#include "parallel/nccl_window_path.h"

namespace moesaic::parallel {

class NcclMapping {
 public:
  using Clock = NcclChannel::Clock;

  NcclMapping(const NcclLibrary& nccl, int device) : nccl_(nccl), device_(device) {}
  NcclMapping(const NcclMapping&) = delete;
  NcclMapping& operator=(const NcclMapping&) = delete;
  // Forgets the other ranks' memory and ends the communicator; may wait for ever (close).
  ~NcclMapping();

  // Collective. Before map.
  Status join(int ranks, const NcclUniqueId& id, int rank, Clock::time_point deadline);
  // Collective, once: `data` of ncclMemAlloc, as many bytes on all ranks, to all. NCCL waits for the
  // other ranks without an end: where it is not done in time the mapping is left to the thread that
  // waits for it, null here, and `data` must stay.
  static Status map(std::shared_ptr<NcclMapping>& mapping, void* data, std::int64_t bytes,
                    Clock::time_point deadline);
  // Where all ranks' memory is. kUnsupported: NCCL has taken the call for nothing that kernels can use.
  Result<std::vector<std::byte*>> addresses(NcclWindowPath path) const;
  // Destroys it where nobody has to wait for that. False: not done in time, so its memory must stay.
  static bool close(std::shared_ptr<NcclMapping> mapping);

 private:
  const NcclLibrary& nccl_;
  int device_;
  int ranks_ = 1, rank_ = 0;
  std::unique_ptr<NcclChannel> channel_;
  void* window_ = nullptr;
  int code_ = NcclLibrary::kSuccess;  // of the registration
};

}  // namespace moesaic::parallel
