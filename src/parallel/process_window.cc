// Peer windows of processes of one host, through CUDA's handles of memory for other processes.
//
// Memory may be freed when nobody has it open any more. So behind each window lies a word of every
// rank, set when that rank has closed it.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "parallel/peer_window_parts.h"

namespace moesaic::parallel {
namespace {

constexpr std::int64_t kWord = sizeof(std::uint32_t);
// A handle is of a whole allocation, and small ones share one.
constexpr std::int64_t kOwnAllocation = std::int64_t{2} << 20;
// How long a rank that lets go waits for the others to do so too.
constexpr auto kPatience = std::chrono::milliseconds(500);

// This rank's memory that others may have open.
struct Lent {
  int device = 0, rank = 0, ranks = 1;
  std::byte* data = nullptr;
  std::int64_t words = 0;  // where they begin

  bool free_if_closed() const {
    std::vector<std::uint32_t> closed(static_cast<std::size_t>(ranks));
    const cuda::DeviceScope scope(device);
    const Status read =
        cuda::copy_to_host("peer windows", closed.data(), data + words, ranks * kWord);
    closed[static_cast<std::size_t>(rank)] = 1;
    if (!read.ok() || std::count(closed.begin(), closed.end(), 0U) > 0) return false;
    static_cast<void>(cudaFree(data));
    return true;
  }
};

// What was let go of while others had it open.
class LeftBehind {
 public:
  void add(const Lent& lent) {
    const std::lock_guard lock(mutex_);
    lent_.push_back(lent);
  }
  void free_closed() {
    const std::lock_guard lock(mutex_);
    std::erase_if(lent_, [](const Lent& l) { return l.free_if_closed(); });
  }

 private:
  std::mutex mutex_;
  std::vector<Lent> lent_;
};
// Never destroyed: at the end of the process CUDA may be gone before it.
LeftBehind& left_behind() {
  static auto* const all = new LeftBehind();
  return *all;
}

class ProcessWindow final : public PeerWindow {
 public:
  ProcessWindow(const Lent& own, std::int64_t bytes) : own_(own), bytes_(bytes) {
    bases_.resize(static_cast<std::size_t>(own.ranks));
    bases_[static_cast<std::size_t>(own.rank)] = own.data;
  }
  ProcessWindow(const ProcessWindow&) = delete;
  ProcessWindow& operator=(const ProcessWindow&) = delete;
  ~ProcessWindow() override {
    const cuda::DeviceScope scope(own_.device);
    // Nothing of ours writes to the others any more.
    static_cast<void>(cuda::check_call("peer windows", cudaDeviceSynchronize()));
    for (int r = 0; r < own_.ranks; ++r) close(r);
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!own_.free_if_closed()) {
      if (std::chrono::steady_clock::now() > end) {
        left_behind().add(own_);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  int rank() const override { return own_.rank; }
  int size() const override { return own_.ranks; }
  std::int64_t bytes() const override { return bytes_; }
  std::byte* base(int rank) const override { return bases_[static_cast<std::size_t>(rank)]; }
  bool shares_device() const override { return shares_device_; }
  bool shares_streams() const override { return false; }

  void set_shares_device() { shares_device_ = true; }
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
    std::byte* const data = bases_[static_cast<std::size_t>(rank)];
    if (rank == own_.rank || data == nullptr || MOESAIC_FAULT(process_window_is_not_closed)) return;
    const std::uint32_t closed = 1;
    std::byte* const word = data + own_.words + own_.rank * kWord;
    static_cast<void>(cuda::copy_to_device("peer windows", word, &closed, kWord));
    static_cast<void>(cuda::check_call("peer windows", cudaIpcCloseMemHandle(data)));
  }

  Lent own_;
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
Status lend(std::int64_t bytes, Lent& own, cudaIpcMemHandle_t& handle) {
  own.words = round_up(bytes, std::int64_t{256});
  const std::int64_t all = round_up(own.words + own.ranks * kWord, kOwnAllocation);
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
  left_behind().free_closed();
  Lent own{device, rank, size, nullptr, 0};
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
    if (own.data != nullptr) static_cast<void>(cudaFree(own.data));
    return status;
  }
  auto window = std::make_unique<ProcessWindow>(own, bytes);
  std::vector<Told> all(static_cast<std::size_t>(size));
  const std::vector<std::span<const std::byte>> send(
      all.size(), std::as_bytes(std::span<const Told>(&mine, 1)));
  std::vector<std::span<std::byte>> recv;
  recv.reserve(all.size());
  for (Told& t : all) recv.push_back(std::as_writable_bytes(std::span<Told>(&t, 1)));
  MOESAIC_RETURN_IF_ERROR(communicator.control().exchange(kPeerWindows, send, recv));
  for (int r = 0; r < size && status.ok(); ++r) {
    if (r == rank) continue;
    const Told& other = all[static_cast<std::size_t>(r)];
    if (std::strncmp(other.device, mine.device, sizeof(mine.device)) == 0) {
      window->set_shares_device();
    }
    status = window->open(r, other.handle);
  }
  MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, status));
  return std::unique_ptr<PeerWindow>(std::move(window));
}

}  // namespace moesaic::parallel
