// Peer windows in memory that NCCL allocates, exchanges and maps: its symmetric windows, of which
// kernels here get plain addresses. Needs a device of its own for each rank; ranks are processes of one
// host, or threads.
//
// Nothing that NCCL says of a window is believed before all ranks have read each other's and written
// to each other's.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "parallel/lent_window.h"
#include "parallel/nccl_mapping.h"
#include "parallel/peer_control.h"
#include "parallel/peer_window_parts.h"

namespace moesaic::parallel {
namespace {

// What each rank tells the others.
struct NcclGreeting {
  NcclUniqueId id = {};    // rank 0's is that of all
  char device[32] = {};    // where it is in the machine, however the process numbers it
  std::int64_t nonce = 0;  // for the proof
};

// What a rank writes into windows to show whose they are.
struct Proof {
  std::uint64_t magic = 0x4d6f65736169632e;
  std::int64_t rank = 0, nonce = 0;
  bool operator==(const Proof&) const = default;
};
Proof proof_of(const std::vector<NcclGreeting>& all, int rank) {
  return {.rank = rank, .nonce = all[static_cast<std::size_t>(rank)].nonce};
}
Status write_proof(std::byte* to, const Proof& proof) {
  return cuda::copy_to_device(kPeerWindows, to, &proof, sizeof(proof));
}
Status expect_proof(const std::byte* at, const Proof& want, std::string_view otherwise) {
  Proof got;
  MOESAIC_RETURN_IF_ERROR(cuda::copy_to_host(kPeerWindows, &got, at, sizeof(got)));
  return got == want
             ? Status()
             : unsupported(fmt::format("{}: rank {} {}", kPeerWindows, want.rank, otherwise));
}

void free_nccl_memory(void* data) {
  const auto nccl = nccl_library();
  if (nccl.ok()) static_cast<void>((*nccl)->mem_free(data));
}

class NcclWindow final : public PeerWindow {
 public:
  NcclWindow(const NcclLibrary& nccl, NcclWindowPath path, const LentWindow& own,
             std::int64_t bytes)
      : nccl_(nccl),
        path_(path),
        own_(own),
        bytes_(bytes),
        mapping_(std::make_shared<NcclMapping>(nccl, own.device)) {}
  NcclWindow(const NcclWindow&) = delete;
  NcclWindow& operator=(const NcclWindow&) = delete;
  ~NcclWindow() override {
    const cuda::DeviceScope scope(own_.device);
    // Nothing of ours writes to the others any more.
    static_cast<void>(cuda::check_call("peer windows", cudaDeviceSynchronize()));
    for (int r = 0; proven_ && r < own_.ranks; ++r) {
      if (r != own_.rank) own_.tell_closed(base(r));
    }
    const bool closed = mapping_ == nullptr || NcclMapping::close(std::move(mapping_));
    if (own_.data == nullptr || !closed) return;
    if (proven_) {
      let_go(own_);
    } else {
      own_.free(own_.data);  // nobody was told to use it
    }
  }

  int rank() const override { return own_.rank; }
  int size() const override { return own_.ranks; }
  std::int64_t bytes() const override { return bytes_; }
  std::byte* base(int rank) const override { return bases_[static_cast<std::size_t>(rank)]; }
  bool shares_device() const override { return false; }
  bool shares_streams() const override { return false; }
  PeerProvider provider() const override { return PeerProvider::kNccl; }

  // The steps of making it, each on all ranks before the next.
  Status join(const NcclUniqueId& id, NcclMapping::Clock::time_point deadline) {
    const Status status = mapping_->join(own_.ranks, id, own_.rank, deadline);
    return status.ok() ? status : unsupported(status.message());
  }
  Status allocate() {
    all_ = own_.lay_out(std::max(bytes_, (1 + own_.ranks) * kPeerLine));
    void* data = nullptr;
    if (const int code = nccl_.mem_alloc(&data, static_cast<std::size_t>(all_));
        code != NcclLibrary::kSuccess) {
      static_cast<void>(cudaGetLastError());
      return {StatusCode::kOutOfMemory, fmt::format("peer window of {} bytes: ncclMemAlloc: {}",
                                                    all_, nccl_.get_error_string(code))};
    }
    own_.data = static_cast<std::byte*>(data);
    return wipe();
  }
  Status map(NcclMapping::Clock::time_point deadline) {
    const Status status = NcclMapping::map(mapping_, own_.data, all_, deadline);
    // What NCCL still works on stays where it is.
    if (mapping_ == nullptr) own_.data = nullptr;
    MOESAIC_RETURN_IF_ERROR(status);
    MOESAIC_ASSIGN_OR_RETURN(bases_, mapping_->addresses(path_));
    return {};
  }
  // Collective: whether loads and stores arrive where they should. Leaves zeros.
  Status prove(Communicator& communicator, const std::vector<NcclGreeting>& all) {
    const auto inbox = [](std::byte* window, int from) { return window + (1 + from) * kPeerLine; };
    Status status = write_proof(own_.data, proof_of(all, own_.rank));
    MOESAIC_RETURN_IF_ERROR(communicator.control().barrier(kPeerWindows));
    for (int r = 0; r < own_.ranks && status.ok(); ++r) {
      status = expect_proof(base(r), proof_of(all, r), "has its window elsewhere");
    }
    MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, status));
    for (int r = 0; r < own_.ranks && status.ok(); ++r) {
      status = write_proof(inbox(base(r), own_.rank), proof_of(all, own_.rank));
    }
    MOESAIC_RETURN_IF_ERROR(communicator.control().barrier(kPeerWindows));
    for (int r = 0; r < own_.ranks && status.ok(); ++r) {
      status = expect_proof(inbox(own_.data, r), proof_of(all, r), "cannot write to this window");
    }
    if (status.ok()) status = wipe();
    MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, status));
    proven_ = true;
    // One address for one memory: that which outlives the mapping.
    bases_[static_cast<std::size_t>(own_.rank)] = own_.data;
    return {};
  }

 private:
  Status wipe() {
    MOESAIC_RETURN_IF_ERROR(cuda::fill_zero("peer window", own_.data, all_, nullptr));
    return cuda::synchronize(nullptr);
  }

  const NcclLibrary& nccl_;
  NcclWindowPath path_;
  LentWindow own_;
  std::int64_t bytes_, all_ = 0;
  std::shared_ptr<NcclMapping> mapping_;
  std::vector<std::byte*> bases_;  // of each rank
  bool proven_ = false;
};

Status greet(const NcclLibrary& nccl, int device, int rank, NcclGreeting& mine) {
  std::random_device random;
  mine.nonce = static_cast<std::int64_t>((std::uint64_t{random()} << 31) ^ random());
  MOESAIC_RETURN_IF_ERROR(cuda::check_call(
      kPeerWindows, cudaDeviceGetPCIBusId(mine.device, sizeof(mine.device), device)));
  if (rank != 0) return {};
  const int code = nccl.get_unique_id(&mine.id);
  if (code == NcclLibrary::kSuccess) return {};
  return unsupported(fmt::format("ncclGetUniqueId: {}", nccl.get_error_string(code)));
}

// The same on all ranks: NCCL itself would refuse on some, while others wait.
Status have_devices_of_their_own(const std::vector<NcclGreeting>& all) {
  for (std::size_t r = 1; r < all.size(); ++r) {
    for (std::size_t s = 0; s < r; ++s) {
      if (std::strncmp(all[r].device, all[s].device, sizeof(all[r].device)) != 0) continue;
      return unsupported(fmt::format(
          "peer_memory: nccl for ranks {} and {}, which share a GPU; need one for each", s, r));
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<PeerWindow>> make_nccl_window(Communicator& communicator, int device,
                                                     std::int64_t bytes) {
  const auto deadline =
      NcclMapping::Clock::now() + std::chrono::milliseconds(std::max(communicator.timeout_ms(), 1));
  const int rank = communicator.rank(), size = communicator.size();
  const cuda::DeviceScope scope(device);
  free_left_behind();
  const auto nccl = nccl_library();
  Result<NcclWindowPath> path = nccl.ok() ? nccl_window_path(**nccl) : nccl.status();
  NcclGreeting mine;
  Status status = scope.status();
  if (status.ok()) status = path.status();
  if (status.ok()) status = greet(**nccl, device, rank, mine);
  MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, status));
  std::vector<NcclGreeting> all(static_cast<std::size_t>(size));
  MOESAIC_RETURN_IF_ERROR(peer_tell(communicator, mine, all));
  MOESAIC_RETURN_IF_ERROR(have_devices_of_their_own(all));
  auto window = std::make_unique<NcclWindow>(
      **nccl, *path, LentWindow{device, rank, size, free_nccl_memory}, bytes);
  MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, window->join(all[0].id, deadline)));
  MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, window->allocate()));
  MOESAIC_RETURN_IF_ERROR(peer_vote(communicator, window->map(deadline)));
  MOESAIC_RETURN_IF_ERROR(window->prove(communicator, all));
  return std::unique_ptr<PeerWindow>(std::move(window));
}

}  // namespace moesaic::parallel
