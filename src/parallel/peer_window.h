// Memory of every rank that every other rank's kernels may write to. What is in it:
// parallel/peer_control.h. Ranks are threads of one process, or processes of one host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/status.h"
#include "parallel/peer_memory.h"

namespace moesaic::parallel {

// A bit of a 32-lane vote for each rank.
inline constexpr int kPeerWindowRanks = 32;

class PeerWindow {
 public:
  virtual ~PeerWindow() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::int64_t bytes() const = 0;
  // The window of a rank, as kernels on this rank's device address it; 256-byte aligned.
  virtual std::byte* base(int rank) const = 0;
  // Whether another rank is on this rank's device.
  virtual bool shares_device() const = 0;
  // Whether it is one of this process, so that both have the same default stream.
  virtual bool shares_streams() const = 0;
  virtual PeerProvider provider() const = 0;
};

// Whether kernels that wait for each other may run in this process. kUnsupported: kernels would be
// loaded when they are first launched, which waits until the device is idle, and so for a kernel
// that waits for the very rank that loads; needs CUDA_MODULE_LOADING=EAGER before the first use of
// CUDA. kDevice: no driver.
Status peer_kernels_loaded();

// Collective: windows of `bytes` zeros on all ranks, which are threads of one process or have a process
// of one host each, on `device` of its own or a shared one, by the first provider of `memory` that all
// can have. All ranks succeed or none: kUnsupported with the reason, and whose it is: several hosts,
// processes with several ranks beside others, more than kPeerWindowRanks ranks, devices without access
// to each other, peer_kernels_loaded(), `mine` (whether this rank is ready otherwise), and what a
// provider needs. kInvalidArgument: ranks ask for different memory. kOutOfMemory. The memory of a rank
// lives until all have let go of its window. Processes: one that lets go waits a moment for the
// others, and leaves memory that others still have for a later window or the end of the process; a
// rank that dies may leave memory so in the others.
Result<std::unique_ptr<PeerWindow>> make_peer_window(Communicator& communicator, int device,
                                                     std::int64_t bytes, const Status& mine,
                                                     PeerMemory memory = PeerMemory::kAuto);

}  // namespace moesaic::parallel
