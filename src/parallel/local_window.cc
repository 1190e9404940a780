// Peer windows of ranks that are threads of one process.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "parallel/peer_window_parts.h"

namespace moesaic::parallel {
namespace {

// The windows of all ranks; shared by all, so that none goes while another may be written to.
struct Shared {
  explicit Shared(std::size_t ranks) : windows(ranks) {}
  struct Window {
    int device = 0;
    std::byte* data = nullptr;
    Window() = default;
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;
    ~Window() {
      if (data == nullptr) return;
      const cuda::DeviceScope scope(device);
      static_cast<void>(cudaFree(data));
    }
  };
  std::vector<Window> windows;
};

class LocalWindow final : public PeerWindow {
 public:
  LocalWindow(std::shared_ptr<Shared> shared, int rank, std::int64_t bytes)
      : shared_(std::move(shared)), rank_(rank), bytes_(bytes) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(shared_->windows.size()); }
  std::int64_t bytes() const override { return bytes_; }
  std::byte* base(int rank) const override {
    return shared_->windows[static_cast<std::size_t>(rank)].data;
  }
  bool shares_device() const override {
    const int mine = shared_->windows[static_cast<std::size_t>(rank_)].device;
    return std::count_if(shared_->windows.begin(), shared_->windows.end(),
                         [mine](const Shared::Window& w) { return w.device == mine; }) > 1;
  }
  bool shares_streams() const override { return shares_device(); }
  PeerProvider provider() const override { return PeerProvider::kThreads; }

 private:
  std::shared_ptr<Shared> shared_;
  int rank_;
  std::int64_t bytes_;
};

// Streams of ranks that share a device must not share a queue of it, in which one rank's work would
// stand behind a kernel that waits for it.
Status queues_suffice(const std::vector<std::int64_t>& devices, int device) {
  constexpr int kMostRanks = 8, kQueues = 32;
  const auto here = std::count(devices.begin(), devices.end(), device);
  if (here <= 1) return {};
  if (here > kMostRanks) {
    return unsupported(fmt::format("peer windows: got {} ranks on cuda:{}, need at most {}", here,
                                   device, kMostRanks));
  }
  const char* const queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (queues != nullptr && std::atoi(queues) >= kQueues) return {};
  return unsupported(
      fmt::format("peer windows: {} ranks share cuda:{}, need CUDA_DEVICE_MAX_CONNECTIONS={} in "
                  "the environment",
                  here, device, kQueues));
}

Status reach(int device, std::size_t rank, int other) {
  if (other == device) return {};
  int can = 0;
  MOESAIC_RETURN_IF_ERROR(
      cuda::check_call("peer windows", cudaDeviceCanAccessPeer(&can, device, other)));
  if (can == 0) {
    return unsupported(fmt::format("peer windows: cuda:{} has no access to cuda:{} of rank {}",
                                   device, other, rank));
  }
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) return cuda::check_call("peer windows", error);
  static_cast<void>(cudaGetLastError());
  return {};
}

Status fill(Shared& shared, int rank, int device, const std::vector<std::int64_t>& devices,
            std::int64_t bytes) {
  MOESAIC_RETURN_IF_ERROR(queues_suffice(devices, device));
  for (std::size_t r = 0; r < devices.size(); ++r) {
    MOESAIC_RETURN_IF_ERROR(reach(device, r, static_cast<int>(devices[r])));
  }
  Shared::Window& mine = shared.windows[static_cast<std::size_t>(rank)];
  mine.device = device;
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<std::size_t>(bytes));
  if (error != cudaSuccess) {
    return cuda::check_call(fmt::format("peer window of {} bytes", bytes), error);
  }
  mine.data = static_cast<std::byte*>(data);
  MOESAIC_RETURN_IF_ERROR(cuda::fill_zero("peer window", data, bytes, nullptr));
  return cuda::synchronize(nullptr);
}

}  // namespace

Result<std::unique_ptr<PeerWindow>> make_thread_window(Communicator& communicator, int device,
                                                       std::int64_t bytes) {
  const int rank = communicator.rank(), size = communicator.size();
  Communicator& control = communicator.control();
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> devices,
                           control.all_gather(kPeerWindows, device));
  // One process: rank 0 hands out the address of a shared pointer, which all have copied when they
  // have met again. Where they do not meet it is left behind.
  using Handed = std::shared_ptr<Shared>;
  Handed* const handed =
      rank == 0 ? new Handed(std::make_shared<Shared>(static_cast<std::size_t>(size))) : nullptr;
  MOESAIC_ASSIGN_OR_RETURN(
      const std::vector<std::int64_t> places,
      control.all_gather(kPeerWindows,
                         static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(handed))));
  Handed shared = *reinterpret_cast<const Handed*>(static_cast<std::intptr_t>(places[0]));
  const cuda::DeviceScope scope(device);
  Status status = scope.status();
  if (status.ok()) status = fill(*shared, rank, device, devices, bytes);
  status = peer_vote(communicator, status);
  if (control.state().ok()) delete handed;
  MOESAIC_RETURN_IF_ERROR(status);
  return std::unique_ptr<PeerWindow>(std::make_unique<LocalWindow>(std::move(shared), rank, bytes));
}

}  // namespace moesaic::parallel
