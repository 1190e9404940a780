// NCCL moves the bytes; all ranks first agree on sizes over another communicator: a wrong size, a
// refusal or a lost rank is found before anything is launched that could wait for ever.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "core/hash.h"
#include "cuda/device_memory.h"
#include "moesaic/communicator.h"
#include "moesaic/device.h"
#include "parallel/nccl_channel.h"
#include "parallel/nccl_library.h"

namespace moesaic {
namespace {

using Clock = std::chrono::steady_clock;
using Out = std::span<const std::byte>;
using In = std::span<std::byte>;

bool on_device(const void* p) {
  cudaPointerAttributes a = {};
  if (p == nullptr || cudaPointerGetAttributes(&a, p) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return a.type == cudaMemoryTypeDevice;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const parallel::NcclLibrary& nccl, std::shared_ptr<Communicator> control,
                   int device, const CommunicatorOptions& options)
      : nccl_(nccl), control_(std::move(control)), device_(device), options_(options) {}

  std::string_view name() const override { return "nccl"; }
  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  Status state() const override { return failure_.ok() ? control_->state() : failure_; }
  std::int64_t bytes_sent() const override { return bytes_sent_; }
  int device() const override { return device_; }
  int timeout_ms() const override { return options_.timeout_ms; }
  Communicator& control() override { return control_->control(); }

  Status abandon(std::string_view reason) override {
    if (!state().ok()) return state();
    if (channel_) channel_->abort();
    failure_ = control_->abandon(reason);
    return failure_;
  }

  Status exchange(std::string_view what, std::span<const Out> send, std::span<const In> recv,
                  std::span<std::int64_t> received) override {
    MOESAIC_RETURN_IF_ERROR(state());
    const auto n = static_cast<std::size_t>(size());
    if (send.size() != n || recv.size() != n || (!received.empty() && received.size() != n)) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: got {} messages to send and {} to receive, need {} of each", what,
                          send.size(), recv.size(), n)};
    }
    try {
      const cuda::DeviceScope scope(device_);
      MOESAIC_RETURN_IF_ERROR(scope.status());
      Status status = run(what, send, recv, received);
      if (status.ok() || !failure_.ok() || !control_->state().ok()) return status;
      return agreed_ ? failure_ = status : abandon(status.message());
    } catch (const std::exception& error) {
      return abandon(fmt::format("{}: {}", what, error.what()));
    }
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks, int id) override {
    MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> control, control_->subgroup(ranks, id));
    // Its NCCL communicator is made in its first call, which all members take part in.
    return std::unique_ptr<Communicator>(
        new NcclCommunicator(nccl_, std::move(control), device_, options_));
  }

  // Collective: rank 0's id goes to all, then all connect.
  Status connect(Clock::time_point deadline) {
    if (channel_) return {};
    const auto n = static_cast<std::size_t>(size());
    parallel::NcclUniqueId id = {};
    if (rank() == 0) {
      const int code = nccl_.get_unique_id(&id);
      if (code != parallel::NcclLibrary::kSuccess) {
        return {StatusCode::kDevice,
                fmt::format("ncclGetUniqueId: {}", nccl_.get_error_string(code))};
      }
    }
    const Out mine = std::as_bytes(std::span(&id, 1));
    std::vector<Out> send(n, rank() == 0 ? mine : Out());
    std::vector<parallel::NcclUniqueId> ids(n);
    std::vector<In> recv(n);
    recv[0] = std::as_writable_bytes(std::span(&ids[0], 1));
    MOESAIC_RETURN_IF_ERROR(control_->exchange("nccl id", send, recv));
    auto channel = std::make_unique<parallel::NcclChannel>(nccl_, device_);
    Status status = channel->start(size(), ids[0], rank(), deadline);
    if (!status.ok()) return status;
    channel_ = std::move(channel);
    return {};
  }

 private:
  Status run(std::string_view what, std::span<const Out> send, std::span<const In> recv,
             std::span<std::int64_t> received) {
    agreed_ = false;
    const auto deadline =
        Clock::now() + std::chrono::milliseconds(std::max(options_.timeout_ms, 1));
    MOESAIC_RETURN_IF_ERROR(agree(what, send, recv, !received.empty()));
    if (!agreed_status_.ok()) {
      agreed_ = true;
      return agreed_status_;
    }
    MOESAIC_RETURN_IF_ERROR(connect(deadline));
    MOESAIC_RETURN_IF_ERROR(
        move(send, recv, deadline).with_context(fmt::format("rank {}: {}", rank(), what)));
    if (!received.empty()) std::copy(from_.begin(), from_.end(), received.begin());
    return {};
  }

  // All ranks learn all sizes and judge them alike, so that either all launch or none.
  Status agree(std::string_view what, std::span<const Out> send, std::span<const In> recv,
               bool shorter) {
    const auto n = static_cast<std::size_t>(size());
    const std::size_t words = 2 + 2 * n;
    std::vector<std::int64_t> mine = {static_cast<std::int64_t>(++sequence_),
                                      static_cast<std::int64_t>(fnv1a(what))};
    for (const Out& m : send) mine.push_back(static_cast<std::int64_t>(m.size()));
    for (const In& m : recv) {
      const auto bytes = static_cast<std::int64_t>(m.size());
      mine.push_back(shorter ? -1 - bytes : bytes);
    }
    std::vector<std::int64_t> all(n * words);
    std::vector<Out> out(n, std::as_bytes(std::span<const std::int64_t>(mine)));
    std::vector<In> in;
    for (std::size_t r = 0; r < n; ++r) {
      in.push_back(std::as_writable_bytes(std::span(all).subspan(r * words, words)));
    }
    MOESAIC_RETURN_IF_ERROR(control_->exchange(what, out, in));
    agreed_status_ = judge(what, all, words);
    from_.resize(n);
    for (std::size_t s = 0; s < n; ++s) {
      from_[s] = all[s * words + 2 + static_cast<std::size_t>(rank())];
    }
    return {};
  }

  Status judge(std::string_view what, const std::vector<std::int64_t>& all, std::size_t words) {
    const auto n = static_cast<std::size_t>(size());
    for (std::size_t s = 0; s < n; ++s) {
      if (all[s * words] != all[0] || all[s * words + 1] != all[1]) {
        return {StatusCode::kDevice, fmt::format("{} (call {}): rank {} is in another call ({})",
                                                 what, all[0], s, all[s * words])};
      }
      for (std::size_t r = 0; r < n; ++r) {
        const std::int64_t sent = all[s * words + 2 + r];
        const std::int64_t room = all[r * words + 2 + n + s];
        if (room >= 0 ? sent == room : sent <= -1 - room) continue;
        return {StatusCode::kDevice,
                fmt::format("rank {}: {}: rank {} sent {} bytes, need {}{}", r, what, s, sent,
                            room >= 0 ? "" : "at most ", room >= 0 ? room : -1 - room)};
      }
    }
    return {};
  }

  // A message where NCCL can read or write it: itself when it is on the device, else a stretch of
  // the staging buffer.
  static std::byte* place(const void* p, std::size_t bytes, std::byte* staging, std::size_t& used) {
    if (on_device(p)) return static_cast<std::byte*>(const_cast<void*>(p));
    std::byte* at = staging + used;
    used += (bytes + 255) / 256 * 256;
    return at;
  }
  static std::size_t staged(const void* p, std::size_t bytes) {
    return bytes == 0 || on_device(p) ? 0 : (bytes + 255) / 256 * 256;
  }
  static Status grow(const char* what, cuda::Allocation& buffer, std::size_t bytes) {
    if (buffer.bytes() >= static_cast<std::int64_t>(bytes)) return {};
    return buffer.reserve(what, static_cast<std::int64_t>(bytes));
  }

  Status move(std::span<const Out> send, std::span<const In> recv, Clock::time_point deadline) {
    const auto n = static_cast<std::size_t>(size());
    const auto own = static_cast<std::size_t>(rank());
    std::size_t out_bytes = 0;
    std::size_t in_bytes = 0;
    for (std::size_t r = 0; r < n; ++r) {
      out_bytes += staged(send[r].data(), send[r].size());
      in_bytes += staged(recv[r].data(), static_cast<std::size_t>(from_[r]));
    }
    MOESAIC_RETURN_IF_ERROR(grow("nccl: send buffer", out_, out_bytes));
    MOESAIC_RETURN_IF_ERROR(grow("nccl: receive buffer", in_, in_bytes));
    const cudaStream_t stream = channel_->stream();
    // Callers wrote device messages on streams of their own.
    MOESAIC_RETURN_IF_ERROR(cuda::check_call("nccl: before", cudaDeviceSynchronize()));

    std::size_t used_out = 0;
    std::size_t used_in = 0;
    std::vector<std::byte*> from(n), to(n);
    for (std::size_t r = 0; r < n; ++r) {
      const std::size_t bytes = send[r].size();
      if (bytes > 0) from[r] = place(send[r].data(), bytes, out_.as<std::byte>(), used_out);
      if (bytes > 0 && from[r] != send[r].data()) {
        MOESAIC_RETURN_IF_ERROR(cuda::check_call(
            "nccl: to the device",
            cudaMemcpyAsync(from[r], send[r].data(), bytes, cudaMemcpyHostToDevice, stream)));
      }
      const auto incoming = static_cast<std::size_t>(from_[r]);
      if (incoming > 0) to[r] = place(recv[r].data(), incoming, in_.as<std::byte>(), used_in);
    }
    if (!send[own].empty()) {
      MOESAIC_RETURN_IF_ERROR(cuda::check_call(
          "nccl: own message",
          cudaMemcpyAsync(to[own], from[own], send[own].size(), cudaMemcpyDeviceToDevice, stream)));
    }
    int code = nccl_.group_start();
    for (std::size_t r = 0; r < n && code == parallel::NcclLibrary::kSuccess; ++r) {
      if (r == own) continue;
      const int peer = static_cast<int>(r);
      if (!send[r].empty()) {
        code = nccl_.send(from[r], send[r].size(), parallel::NcclLibrary::kBytes, peer,
                          channel_->comm(), stream);
        bytes_sent_ += static_cast<std::int64_t>(send[r].size());
      }
      if (from_[r] > 0 && code == parallel::NcclLibrary::kSuccess) {
        code = nccl_.recv(to[r], static_cast<std::size_t>(from_[r]), parallel::NcclLibrary::kBytes,
                          peer, channel_->comm(), stream);
      }
    }
    const int ended = nccl_.group_end();
    if (code == parallel::NcclLibrary::kSuccess) code = ended;
    if (code != parallel::NcclLibrary::kSuccess) {
      return {StatusCode::kDevice, fmt::format("nccl: {}", nccl_.get_error_string(code))};
    }
    for (std::size_t r = 0; r < n; ++r) {
      if (from_[r] == 0 || to[r] == recv[r].data()) continue;
      // Pageable memory: this waits for the stream, so first see that it ends.
      MOESAIC_RETURN_IF_ERROR(channel_->wait("nccl", deadline));
      MOESAIC_RETURN_IF_ERROR(cuda::check_call(
          "nccl: to the host",
          cudaMemcpyAsync(recv[r].data(), to[r], static_cast<std::size_t>(from_[r]),
                          cudaMemcpyDeviceToHost, stream)));
    }
    return channel_->wait("nccl", deadline);
  }

  const parallel::NcclLibrary& nccl_;
  std::shared_ptr<Communicator> control_;
  int device_;
  CommunicatorOptions options_;
  std::unique_ptr<parallel::NcclChannel> channel_;
  cuda::Allocation out_, in_;  // staging, grown on demand
  std::vector<std::int64_t> from_;
  Status agreed_status_, failure_;
  bool agreed_ = false;  // all ranks have the same failure: nobody needs to be told
  std::uint64_t sequence_ = 0;
  std::int64_t bytes_sent_ = 0;
};

}  // namespace

Status nccl_available() {
  const CudaInfo info = query_cuda();
  if (!info.available) return {StatusCode::kUnsupported, info.reason};
  return parallel::nccl_library().status();
}

Result<std::unique_ptr<Communicator>> make_nccl_communicator(std::shared_ptr<Communicator> control,
                                                             int device,
                                                             const CommunicatorOptions& options) {
  if (!control) return Status(StatusCode::kInvalidArgument, "control: got none, need one");
  // One rank without NCCL would leave the others waiting: they ask each other first.
  Status mine = check_device(Device::cuda(device));
  const Result<const parallel::NcclLibrary*> library = parallel::nccl_library();
  if (mine.ok()) mine = library.status();
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> ready,
                           control->all_gather("nccl available", mine.ok() ? 1 : 0));
  if (!mine.ok()) return mine;
  const auto missing = std::find(ready.begin(), ready.end(), 0);
  if (missing != ready.end()) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("nccl: rank {} cannot take part", missing - ready.begin()));
  }
  auto made = std::make_unique<NcclCommunicator>(**library, std::move(control), device, options);
  const cuda::DeviceScope scope(device);
  if (!scope.status().ok()) return made->abandon(scope.status().message());  // the others connect
  const Status connected =
      made->connect(Clock::now() + std::chrono::milliseconds(std::max(options.timeout_ms, 1)));
  if (!connected.ok()) return made->abandon(connected.message());
  return std::unique_ptr<Communicator>(std::move(made));
}

}  // namespace moesaic
