// Peer windows of processes of one host, through CUDA's handles of memory for other processes.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "parallel/lent_window.h"
#include "parallel/peer_window_parts.h"

namespace moesaic::parallel {
namespace {

class ProcessWindow final : public PeerWindow {
 public:
  ProcessWindow(const LentWindow& own, std::int64_t bytes) : own_(own), bytes_(bytes) {
    bases_.resize(static_cast<std::size_t>(own.ranks));
    bases_[static_cast<std::size_t>(own.rank)] = own.data;
  }
  ProcessWindow(const ProcessWindow&) = delete;
  ProcessWindow& operator=(const ProcessWindow&) = delete;
  ~ProcessWindow() override {
    const cuda::DeviceScope scope(own_.device);
    // Nothing of ours writes to the others any more.
    static_cast<void>(cuda::check_call("peer windows", cudaDeviceSynchronize()));
    close_all();
    if (own_.data != nullptr) let_go(own_);
  }

  int rank() const override { return own_.rank; }
  int size() const override { return own_.ranks; }
  std::int64_t bytes() const override { return bytes_; }
  std::byte* base(int rank) const override { return bases_[static_cast<std::size_t>(rank)]; }
  bool shares_device() const override { return shares_device_; }
  bool shares_streams() const override { return false; }
  PeerProvider provider() const override { return PeerProvider::kCudaHandles; }

  void set_shares_device() { shares_device_ = true; }
  void close_all() {
    for (int r = 0; r < own_.ranks; ++r) close(r);
  }
  // Nobody has the own memory open any more, also who never opened it and so tells nothing.
  void free_own() {
    own_.free(own_.data);
    own_.data = nullptr;
  }
  Status open(int rank, const cudaIpcMemHandle_t& handle) {
    void* data = nullptr;
    const Status opened =
        cuda::check_call(fmt::format("{}: the window of rank {}", kPeerWindows, rank),
                         cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess));
    if (!opened.ok()) return unsupported(opened.message());
    // Before the end: what was opened is closed in any case.
    bases_[static_cast<std::size_t>(rank)] = static_cast<std::byte*>(data);
    return {};
  }

 private:
  void close(int rank) {
    std::byte* const data = std::exchange(bases_[static_cast<std::size_t>(rank)], nullptr);
    if (rank == own_.rank || data == nullptr || MOESAIC_FAULT(process_window_is_not_closed)) return;
    own_.tell_closed(data);
    static_cast<void>(cuda::check_call("peer windows", cudaIpcCloseMemHandle(data)));
  }

  LentWindow own_;
  std::int64_t bytes_;
  std::vector<std::byte*> bases_;  // of each rank, null: not open
  bool shares_device_ = false;
};

// What each rank tells the others.
struct Told {
  cudaIpcMemHandle_t handle = {};
  char device[32] = {};  // where it is in the machine, however the process numbers it
};

// Zeros, and the handle for others.
Status lend(std::int64_t bytes, LentWindow& own, cudaIpcMemHandle_t& handle) {
  const std::int64_t all = own.lay_out(bytes);
  void* data = nullptr;
  MOESAIC_RETURN_IF_ERROR(cuda::check_call(fmt::format("peer window of {} bytes", all),
                                           cudaMalloc(&data, static_cast<std::size_t>(all))));
  own.data = static_cast<std::byte*>(data);
  MOESAIC_RETURN_IF_ERROR(cuda::fill_zero("peer window", data, all, nullptr));
  MOESAIC_RETURN_IF_ERROR(cuda::synchronize(nullptr));
  const Status made =
      cuda::check_call("peer windows: a handle for others", cudaIpcGetMemHandle(&handle, data));
  return made.ok() ? made : unsupported(made.message());
}

}  // namespace

Result<std::unique_ptr<PeerWindow>> make_process_window(Communicator& communicator, int device,
                                                        std::int64_t bytes) {
  const int rank = communicator.rank(), size = communicator.size();
  const cuda::DeviceScope scope(device);
  free_left_behind();
  LentWindow own{device, rank, size, [](void* data) { static_cast<void>(cudaFree(data)); }};
  Told mine;
  Status status = scope.status();
  if (status.ok()) {
    status = cuda::check_call("peer windows",
                              cudaDeviceGetPCIBusId(mine.device, sizeof(mine.device), device));
  }
  if (status.ok()) status = lend(bytes, own, mine.handle);
  status = peer_vote(communicator, status);
  if (!status.ok()) {
    // Nobody has its handle.
    if (own.data != nullptr) own.free(own.data);
    return status;
  }
  auto window = std::make_unique<ProcessWindow>(own, bytes);
  std::vector<Told> all(static_cast<std::size_t>(size));
  MOESAIC_RETURN_IF_ERROR(peer_tell(communicator, mine, all));
  for (int r = 0; r < size && status.ok(); ++r) {
    if (r == rank) continue;
    const Told& other = all[static_cast<std::size_t>(r)];
    if (std::strncmp(other.device, mine.device, sizeof(mine.device)) == 0) {
      window->set_shares_device();
    }
    status = window->open(r, other.handle);
  }
  if (rank == 1 && MOESAIC_FAULT(process_window_refused_by_rank_1)) {
    status = {StatusCode::kUnsupported, "peer windows: rank 1 opens none"};
  }
  status = peer_vote(communicator, status);
  if (status.ok()) return std::unique_ptr<PeerWindow>(std::move(window));
  window->close_all();
  // Freed when all have closed what they opened, which is when all have come to this vote.
  if (peer_vote(communicator, {}).ok() && !MOESAIC_FAULT(process_window_refused_is_kept)) {
    window->free_own();
  }
  return status;
}

}  // namespace moesaic::parallel
