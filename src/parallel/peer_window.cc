// Which provider of peer windows the ranks have in common.
#include "parallel/peer_window.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <random>
#include <string>
#include <utility>

#include "core/hash.h"
#include "core/refusal.h"
#include "cuda/driver.h"
#include "moesaic/device.h"
#include "parallel/nccl_window_path.h"
#include "parallel/peer_window_parts.h"

namespace moesaic::parallel {
namespace {

// Drawn once; tells processes apart, also those of different hosts.
std::int64_t process_number() {
  static const std::int64_t number = [] {
    std::random_device random;
    return static_cast<std::int64_t>((std::uint64_t{random()} << 31) ^ random());
  }();
  return number;
}

// The same for all processes of a host, other on another one.
std::int64_t host_number() {
  std::string name;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  if (!std::getline(boot, name)) {
    std::array<char, 256> host{};
    if (::gethostname(host.data(), host.size() - 1) == 0) name = host.data();
  }
  return static_cast<std::int64_t>(fnv1a(name));
}

// Where a rank is, and what it asks for.
struct Place {
  std::int64_t process = 0, host = 0;
  PeerMemory memory = PeerMemory::kAuto;
};

// Whether ranks are threads of one process; else they have a process of one host each.
Result<bool> are_threads(const std::vector<Place>& places) {
  std::vector<std::int64_t> processes;
  for (std::size_t r = 0; r < places.size(); ++r) {
    processes.push_back(places[r].process);
    if (places[r].host != places[0].host) {
      return unsupported(
          fmt::format("{}: ranks 0 and {} are on different hosts, need one host", kPeerWindows, r));
    }
  }
  std::sort(processes.begin(), processes.end());
  const auto distinct =
      static_cast<std::size_t>(std::unique(processes.begin(), processes.end()) - processes.begin());
  if (distinct == 1 || distinct == places.size()) return distinct == 1;
  return unsupported(
      fmt::format("{}: got {} ranks in {} processes, need threads of one process or a process for "
                  "each",
                  kPeerWindows, places.size(), distinct));
}

Status ask_for_the_same(const std::vector<Place>& places) {
  for (std::size_t r = 1; r < places.size(); ++r) {
    if (places[r].memory == places[0].memory) continue;
    return invalid(fmt::format("peer_memory: got {} on rank 0 and {} on rank {}, need the same",
                               peer_memory_name(places[0].memory),
                               peer_memory_name(places[r].memory), r));
  }
  return {};
}

Result<std::unique_ptr<PeerWindow>> make_by(PeerProvider provider, Communicator& communicator,
                                            int device, std::int64_t bytes) {
  switch (provider) {
    case PeerProvider::kThreads:
      return make_thread_window(communicator, device, bytes);
    case PeerProvider::kCudaHandles:
      return make_process_window(communicator, device, bytes);
    case PeerProvider::kNccl:
      return make_nccl_window(communicator, device, bytes);
  }
  return unsupported(fmt::format("{}: no such provider", kPeerWindows));
}

}  // namespace

Status peer_vote(Communicator& communicator, const Status& mine) {
  const auto all = communicator.control().all_gather(kPeerWindows, mine.ok() ? 1 : 0);
  MOESAIC_RETURN_IF_ERROR(mine);
  if (!all.ok()) return all.status();
  for (std::size_t r = 0; r < all->size(); ++r) {
    if ((*all)[r] == 0) {
      return unsupported(
          fmt::format("{}: rank {} cannot, its own message says why", kPeerWindows, r));
    }
  }
  return {};
}

Result<std::unique_ptr<PeerWindow>> make_peer_window(Communicator& communicator, int device,
                                                     std::int64_t bytes, const Status& mine,
                                                     PeerMemory memory) {
  if (communicator.size() > kPeerWindowRanks) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: got {} ranks, need at most {}", kPeerWindows,
                              communicator.size(), kPeerWindowRanks));
  }
  std::vector<Place> places(static_cast<std::size_t>(communicator.size()));
  MOESAIC_RETURN_IF_ERROR(
      peer_tell(communicator, Place{process_number(), host_number(), memory}, places));
  MOESAIC_ASSIGN_OR_RETURN(const bool threads, are_threads(places));
  MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, mine.ok() ? peer_kernels_loaded() : mine));
  MOESAIC_RETURN_IF_ERROR(ask_for_the_same(places));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<PeerProvider> providers,
                           peer_providers(memory, threads));
  Status refused;
  for (const PeerProvider provider : providers) {
    Result<std::unique_ptr<PeerWindow>> made = make_by(provider, communicator, device, bytes);
    if (made.ok()) return made;
    // The code is that of the first; no rank goes on where not all can.
    refused = refused.ok() ? made.status()
                           : Status(refused.code(), fmt::format("{}; {}: {}", refused.message(),
                                                                peer_provider_name(provider),
                                                                made.status().message()));
    if (!communicator.control().state().ok()) break;
  }
  return refused;
}

Status peer_kernels_loaded() {
  using GetLoadingMode = int (*)(int*);
  const Result<void*> function = cuda::driver_function("cuModuleGetLoadingMode", 11070);
  if (!function.ok() && function.status().code() != StatusCode::kUnsupported) {
    return function.status().with_context("peer windows");
  }
  constexpr int kEager = 1;  // CU_MODULE_EAGER_LOADING
  int mode = 0;
  if (!function.ok() || reinterpret_cast<GetLoadingMode>(*function)(&mode) != 0 || mode != kEager) {
    return unsupported(
        "peer windows: kernels are loaded at their first launch, which may wait for a kernel that "
        "waits for it; need CUDA_MODULE_LOADING=EAGER in the environment");
  }
  return {};
}

}  // namespace moesaic::parallel

namespace moesaic {
Status peer_windows_available() {
  const CudaInfo info = query_cuda();
  if (!info.available) return {StatusCode::kDevice, info.reason};
  return parallel::peer_kernels_loaded();
}
Status nccl_windows_available() {
  MOESAIC_RETURN_IF_ERROR(nccl_available());
  MOESAIC_ASSIGN_OR_RETURN(const parallel::NcclLibrary* const nccl, parallel::nccl_library());
  return parallel::nccl_window_path(*nccl).status();
}
}  // namespace moesaic
