#include "parallel/nccl_mapping.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "parallel/helper_thread.h"

namespace moesaic::parallel {
namespace {

// How long letting go may take; nothing of it waits for another rank, unless NCCL has a fault.
constexpr auto kClosingPatience = std::chrono::seconds(5);

// What NCCL's windows need, and says nothing about when it is not there.
constexpr std::string_view kNoWindow =
    "nccl: registering memory made no window; need access between the GPUs of all ranks, and not 0 "
    "in NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE";

bool is_device_memory(const void* p) {
  cudaPointerAttributes a = {};
  if (p != nullptr && cudaPointerGetAttributes(&a, p) == cudaSuccess) {
    return a.type == cudaMemoryTypeDevice;
  }
  static_cast<void>(cudaGetLastError());
  return false;
}

}  // namespace

NcclMapping::~NcclMapping() {
  const cuda::DeviceScope scope(device_);
  if (window_ != nullptr) {
    static_cast<void>(nccl_.comm_window_deregister(channel_->comm(), window_));
  }
  channel_.reset();
}

Status NcclMapping::join(int ranks, const NcclUniqueId& id, int rank, Clock::time_point deadline) {
  ranks_ = ranks;
  rank_ = rank;
  channel_ = std::make_unique<NcclChannel>(nccl_, device_);
  return channel_->start(ranks, id, rank, deadline, NcclChannel::Messages::kNone);
}

Status NcclMapping::map(std::shared_ptr<NcclMapping>& mapping, void* data, std::int64_t bytes,
                        Clock::time_point deadline) {
  HelperThread thread;
  MOESAIC_RETURN_IF_ERROR(thread.start(mapping->device_, [m = mapping, data, bytes] {
    m->code_ =
        m->nccl_.comm_window_register(m->channel_->comm(), data, static_cast<std::size_t>(bytes),
                                      &m->window_, NcclLibrary::kSymmetric);
  }));
  if (!thread.done_by(deadline)) {
    mapping.reset();
    return unsupported("ncclCommWindowRegister: not done within the time");
  }
  if (mapping->code_ == NcclLibrary::kSuccess) return {};
  mapping->window_ = nullptr;
  return unsupported(
      fmt::format("ncclCommWindowRegister: {}", mapping->nccl_.get_error_string(mapping->code_)));
}

Result<std::vector<std::byte*>> NcclMapping::addresses(NcclWindowPath path) const {
  if (window_ == nullptr) return unsupported(std::string(kNoWindow));
  std::vector<std::byte*> all;
  if (path == NcclWindowPath::kApi) {
    for (int r = 0; r < ranks_; ++r) {
      void* there = nullptr;
      const int code = nccl_.get_lsa_device_pointer(window_, 0, r, &there);
      if (code != NcclLibrary::kSuccess) {
        return unsupported(
            fmt::format("ncclGetLsaDevicePointer: rank {}: {}", r, nccl_.get_error_string(code)));
      }
      all.push_back(static_cast<std::byte*>(there));
    }
  } else {
    // Without windows the handle is one of host memory.
    if (!is_device_memory(window_)) return unsupported(std::string(kNoWindow));
    NcclWindowRecord record = {};
    MOESAIC_RETURN_IF_ERROR(
        cuda::copy_to_host("record of a window", &record, window_, sizeof(record)));
    const NcclTeam team =
        nccl_.team_lsa != nullptr ? nccl_.team_lsa(channel_->comm()) : NcclTeam{ranks_, rank_, 1};
    if (team.ranks != ranks_ || record.lsa_rank != rank_ || record.world_rank != rank_ ||
        record.first == nullptr || record.stride_4g == 0) {
      return unsupported(fmt::format(
          "nccl: the record of a window is of rank {} among {} that it can address, need rank {} "
          "among {}",
          record.lsa_rank, team.ranks, rank_, ranks_));
    }
    for (int r = 0; r < ranks_; ++r) all.push_back(record.of(r));
  }
  for (int r = 0; r < ranks_; ++r) {
    if (is_device_memory(all[static_cast<std::size_t>(r)])) continue;
    return unsupported(fmt::format("nccl: the window of rank {} is not mapped", r));
  }
  return all;
}

bool NcclMapping::close(std::shared_ptr<NcclMapping> mapping) {
  HelperThread thread;
  const auto end = Clock::now() + kClosingPatience;
  // The thread has the last reference, and drops it at its end.
  const int device = mapping->device_;
  const Status started = thread.start(device, [m = std::move(mapping)]() mutable { m.reset(); });
  return started.ok() && thread.done_by(end);
}

}  // namespace moesaic::parallel
