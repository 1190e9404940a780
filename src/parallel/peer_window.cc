// Which provider of peer windows the ranks have in common.
#include "parallel/peer_window.h"

#include <cuda_runtime.h>
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
#include "cuda/device_memory.h"
#include "moesaic/device.h"
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
                                                     std::int64_t bytes, const Status& mine) {
  if (communicator.size() > kPeerWindowRanks) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: got {} ranks, need at most {}", kPeerWindows,
                              communicator.size(), kPeerWindowRanks));
  }
  Communicator& control = communicator.control();
  MOESAIC_ASSIGN_OR_RETURN(std::vector<std::int64_t> processes,
                           control.all_gather(kPeerWindows, process_number()));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> hosts,
                           control.all_gather(kPeerWindows, host_number()));
  for (std::size_t r = 1; r < hosts.size(); ++r) {
    if (hosts[r] != hosts[0]) {
      return Status(
          StatusCode::kUnsupported,
          fmt::format("{}: ranks 0 and {} are on different hosts, need one host", kPeerWindows, r));
    }
  }
  std::sort(processes.begin(), processes.end());
  const auto distinct = std::unique(processes.begin(), processes.end()) - processes.begin();
  if (distinct != 1 && distinct != communicator.size()) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: got {} ranks in {} processes, need threads of one process or a "
                              "process for each",
                              kPeerWindows, communicator.size(), distinct));
  }
  MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, mine.ok() ? peer_kernels_loaded() : mine));
  return distinct == 1 ? make_thread_window(communicator, device, bytes)
                       : make_process_window(communicator, device, bytes);
}

Status peer_kernels_loaded() {
  using GetLoadingMode = int (*)(int*);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  MOESAIC_RETURN_IF_ERROR(cuda::check_call(
      "peer windows", cudaGetDriverEntryPointByVersion("cuModuleGetLoadingMode", &function, 11070,
                                                       cudaEnableDefault, &found)));
#else
  MOESAIC_RETURN_IF_ERROR(cuda::check_call(
      "peer windows",
      cudaGetDriverEntryPoint("cuModuleGetLoadingMode", &function, cudaEnableDefault, &found)));
#endif
  constexpr int kEager = 1;  // CU_MODULE_EAGER_LOADING
  int mode = 0;
  if (function == nullptr || found != cudaDriverEntryPointSuccess ||
      reinterpret_cast<GetLoadingMode>(function)(&mode) != 0 || mode != kEager) {
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
}  // namespace moesaic
