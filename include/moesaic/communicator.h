// Communicator: how ranks exchange bytes. One primitive, everything else is built on it; every call
// ends within a configured time, whatever happens to the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic {

// How GPUs of ranks come by memory that the others' kernels write to (RankEngine::kPeerWindows).
enum class PeerMemory : std::uint8_t {
  // Threads of one process: one object. Processes: kCudaHandles, where some rank cannot kNccl.
  kAuto,
  kCudaHandles,  // CUDA's handles of memory for other processes; a process for each rank
  // Symmetric windows of NCCL (libnccl.so.2, 2.28.3 or newer): a GPU of its own for each rank, which
  // is a process or a thread. Each window has a communicator of NCCL, made with it.
  kNccl,
};
std::string_view peer_memory_name(PeerMemory memory);  // "auto", "cuda_handles", "nccl"

struct CommunicatorOptions {
  // How long one call may wait for its peers. A rank that has not taken part by then counts as lost.
  // Below 1: 1.
  int timeout_ms = 60'000;
};

// The second half of an exchange that was started: see Communicator::start_exchange.
class PendingExchange {
 public:
  virtual ~PendingExchange() = default;
  // Waits for the other ranks; returns what exchange() would have returned. Once.
  virtual Status complete() = 0;
};

// Collective calls: all ranks of a communicator make the same calls in the same order, each from
// one thread at a time. Messages are copied into buffers of the communicator, so the caller's
// memory is free on return even after a failure.
//
// Failure: a peer that sends nothing within the time, a message of an unexpected size or of another
// call is kDevice with the ranks involved and what was being done. The rank that notices tells the
// others, which return the same reason, and the communicator (with all its subgroups) is broken:
// every later call returns that first failure at once. Outputs are unspecified then.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::string_view name() const = 0;  // "self", "in_process", "mpi", "nccl"
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // ok, or the failure that broke it.
  virtual Status state() const = 0;
  // Bytes of payload that this object sent to other ranks so far.
  virtual std::int64_t bytes_sent() const = 0;
  // Messages may lie in host memory and in the memory of this GPU; -1: in host memory only.
  virtual int device() const { return -1; }
  // CommunicatorOptions::timeout_ms.
  virtual int timeout_ms() const { return CommunicatorOptions().timeout_ms; }
  // Connects the same ranks with the least delay for small host messages: either this communicator
  // or the one that it was made from. Calls through either count as calls in the same order.
  virtual Communicator& control() { return *this; }

  // send[r] goes to rank r, recv[r] is filled from rank r (the own entry is copied).
  //   what      names the call in errors; must be the same on all ranks
  //   received  [size]: messages may be shorter than recv[r], and this is how long they were.
  //             Empty: every message must fill recv[r].
  // kInvalidArgument (before anything is sent) unless both spans have one entry per rank.
  virtual Status exchange(std::string_view what, std::span<const std::span<const std::byte>> send,
                          std::span<const std::span<std::byte>> recv,
                          std::span<std::int64_t> received = {}) = 0;

  // exchange() in two halves: this one sends, and waits for nobody; complete() receives. The
  // messages to send are free on return; recv and received are filled at any time until complete()
  // returns, and live until then or until the object is destroyed. Other calls, of subgroups too,
  // may be made in between, several exchanges may be under way and be completed in any order; all
  // ranks start them in the same order. One that is destroyed without complete() breaks the
  // communicator. Errors of the first half: those of exchange().
  // Here, and wherever overlaps() is false: waits for the others at once, and complete() returns
  // what came of it.
  virtual Result<std::unique_ptr<PendingExchange>> start_exchange(
      std::string_view what, std::span<const std::span<const std::byte>> send,
      std::span<const std::span<std::byte>> recv, std::span<std::int64_t> received = {});
  // Whether a started exchange leaves this rank free to do something else.
  virtual bool overlaps() const { return false; }

  // Breaks the communicator because a peer's message makes no sense to the caller: the others learn
  // `reason` in the call they are in, or in their next one. Returns the failure that broke it.
  virtual Status abandon(std::string_view reason) = 0;

  // The communicator of some ranks of this one, in the given order; not collective, but all its
  // members must make it the same way. Groups that share a member need different ids, 1 .. 1000.
  // kInvalidArgument unless the ranks are distinct, exist and include this one. Valid as long as
  // its parent.
  virtual Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks, int id) = 0;
  // As subgroup(), but made once: the same ranks and id are the same communicator again, which
  // lives as long as this one (a broken one is made anew). Layers take their groups from here, so
  // that a model connects each group once however many layers it has.
  Result<std::shared_ptr<Communicator>> shared_subgroup(std::span<const int> ranks, int id);

  // Returns when all ranks have called it.
  Status barrier(std::string_view what);
  // all[r] = value of rank r.
  Result<std::vector<std::int64_t>> all_gather(std::string_view what, std::int64_t value);
  // values[i] = sum over ranks of values[i], added in rank order 0, 1, ..: the same bits on every
  // rank and every run. All ranks pass the same length.
  Status all_reduce_sum(std::string_view what, std::span<float> values);

 private:
  struct SharedGroup {
    std::vector<int> ranks;
    int id = 0;
    std::shared_ptr<Communicator> group;
  };
  std::vector<SharedGroup> shared_groups_;
};

// `size` ranks for as many threads of this process.
Result<std::vector<std::unique_ptr<Communicator>>> make_in_process_communicators(
    int size, const CommunicatorOptions& options = {});

// All processes that mpirun started. Initialises MPI if nobody has; then the last communicator
// finalises it, unless one broke: MPI_Finalize would wait for the lost rank. kUnsupported in a
// build without MPI, kDevice when MPI does not start. mpirun ends all processes when one dies
// unless it was given --enable-recovery; with it the others live and report.
Result<std::unique_ptr<Communicator>> make_mpi_communicator(
    const CommunicatorOptions& options = {});

// A GPU for each rank: messages go from device to device through NCCL, which is loaded at run time
// with NVLink multicast switched off. Collective.
//   control  connects the same ranks over the CPU (threads or MPI): before each call all ranks
//            learn all sizes through it, so that all of them report a wrong size or call and nothing
//            is launched. Its own failures are failures of this one.
//   device   of this rank, another one for each rank of a host
// Messages may lie in host memory, which is staged through device memory, or in memory of `device`;
// work on the device that writes or reads them must be on it before the call (the call waits for
// it). NCCL work that is not done in time is aborted and reported. kUnsupported: a build without
// CUDA, no usable device, no libnccl.so.2 (2.18 or newer), on this or another rank.
Result<std::unique_ptr<Communicator>> make_nccl_communicator(
    std::shared_ptr<Communicator> control, int device, const CommunicatorOptions& options = {});

// What this build and machine offer: ok, or why not.
Status mpi_available();
Status nccl_available();  // looks for the library at run time
// RankEngine::kPeerWindows: whether kernels of this process may wait for each other.
Status peer_windows_available();
// PeerMemory::kNccl: whether there is a libnccl.so.2 whose windows kernels can write to.
Status nccl_windows_available();
// Whether this process was started by mpirun or a compatible launcher.
bool launched_by_mpi();

}  // namespace moesaic
