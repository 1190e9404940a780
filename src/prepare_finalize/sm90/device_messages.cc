#include "prepare_finalize/sm90/device_messages.h"

#include <fmt/format.h>

#include <new>
#include <utility>

#include "core/checked.h"
#include "cuda/device_memory.h"
#include "prepare_finalize/sm90/rank_rows.h"

namespace moesaic::cuda {

using Out = std::span<const std::byte>;
using In = std::span<std::byte>;

Result<DeviceMessages> DeviceMessages::create(std::shared_ptr<Communicator> communicator,
                                              int device) {
  if (!communicator) {
    return Status(StatusCode::kInvalidArgument, "communicator: got none, need one");
  }
  const int theirs = communicator->device();
  if (theirs >= 0 && theirs != device) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("communicator: got one whose messages lie on cuda:{}, need cuda:{}",
                              theirs, device));
  }
  DeviceMessages m;
  m.communicator_ = std::move(communicator);
  m.staging_ = std::make_shared<Staging>();
  return m;
}

Status DeviceMessages::exchange(void* stream, std::string_view what, std::span<const Out> send,
                                std::span<const In> recv, std::span<std::int64_t> received) const {
  if (!through_host()) return communicator_->exchange(what, send, recv, received);
  try {
    return stage(stream, what, send, recv, received);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, fmt::format("{}: messages on the host", what)};
  }
}

Status DeviceMessages::stage(void* stream, std::string_view what, std::span<const Out> send,
                             std::span<const In> recv, std::span<std::int64_t> received) const {
  const auto n = static_cast<std::size_t>(size());
  Staging& s = *staging_;
  s.out.resize(n);
  s.in.resize(n);
  std::vector<Out> out(n);
  std::vector<In> in(n);
  std::vector<std::int64_t> lengths(n);
  MOESAIC_RETURN_IF_ERROR(synchronize(stream));
  for (std::size_t r = 0; r < n; ++r) {
    if (s.out[r].size() < send[r].size()) s.out[r].resize(send[r].size());
    if (s.in[r].size() < recv[r].size()) s.in[r].resize(recv[r].size());
    out[r] = Out(s.out[r].data(), send[r].size());
    in[r] = In(s.in[r].data(), recv[r].size());
    lengths[r] = static_cast<std::int64_t>(recv[r].size());
    if (send[r].empty()) continue;
    MOESAIC_RETURN_IF_ERROR(copy_to_host(what, s.out[r].data(), send[r].data(),
                                         static_cast<std::int64_t>(send[r].size())));
  }
  MOESAIC_RETURN_IF_ERROR(communicator_->exchange(
      what, out, in, received.empty() ? std::span<std::int64_t>() : std::span(lengths)));
  for (std::size_t r = 0; r < n; ++r) {
    if (!received.empty()) received[r] = lengths[r];
    if (lengths[r] == 0) continue;
    MOESAIC_RETURN_IF_ERROR(copy_to_device(what, recv[r].data(), s.in[r].data(), lengths[r]));
  }
  // A copy from pageable memory may still be on its way, and `stream` need not wait for it.
  return synchronize(nullptr);
}

struct DeviceReplicas::Buffers {
  Allocation parts, sum;
};

Result<DeviceReplicas> DeviceReplicas::create(std::shared_ptr<Communicator> communicator,
                                              int device, std::int64_t most_bytes) {
  MOESAIC_ASSIGN_OR_RETURN(DeviceMessages messages,
                           DeviceMessages::create(std::move(communicator), device));
  DeviceReplicas replicas(std::move(messages));
  replicas.buffers_ = std::make_shared<Buffers>();
  const std::int64_t n = replicas.messages_.size();
  // Parts differ by one element at most.
  const std::int64_t part = ceil_div(most_bytes, n) + 256;
  MOESAIC_RETURN_IF_ERROR(replicas.buffers_->parts.reserve("sums of replicas", n * part));
  MOESAIC_RETURN_IF_ERROR(replicas.buffers_->sum.reserve("sums of replicas", part));
  return replicas;
}

Status DeviceReplicas::all_reduce_sum(void* stream, void* values, std::int64_t count,
                                      bool bf16) const {
  const int n = messages_.size();
  if (n == 1 || count == 0) return {};
  const std::int64_t element = bf16 ? 2 : 4;
  auto* const data = static_cast<std::byte*>(values);
  // Rank r sums the r-th part of all ranks' values in rank order and sends the sum to all.
  const auto first = [&](int r) { return count * r / n * element; };
  const auto part = [&](int r) {
    return In(data + first(r), static_cast<std::size_t>(first(r + 1) - first(r)));
  };
  const In mine = part(messages_.rank());
  auto* const parts = buffers_->parts.as<std::byte>();
  auto* const sum = buffers_->sum.as<std::byte>();
  std::vector<Out> send;
  std::vector<In> recv;
  for (int r = 0; r < n; ++r) {
    send.push_back(part(r));
    recv.emplace_back(parts + static_cast<std::size_t>(r) * mine.size(), mine.size());
  }
  MOESAIC_RETURN_IF_ERROR(messages_.exchange(stream, "reduce", send, recv));
  MOESAIC_RETURN_IF_ERROR(check_call(
      "reduce", launch_sum_in_order(parts, n, static_cast<std::int64_t>(mine.size()) / element,
                                    bf16, sum, stream)));
  send.assign(static_cast<std::size_t>(n), Out(sum, mine.size()));
  recv.clear();
  for (int r = 0; r < n; ++r) recv.push_back(part(r));
  return messages_.exchange(stream, "reduce", send, recv);
}

Status DeviceReplicas::gather(void* stream, std::byte* data,
                              std::span<const std::int64_t> first) const {
  const auto n = static_cast<std::size_t>(messages_.size());
  const auto me = static_cast<std::size_t>(messages_.rank());
  const auto stretch = [&](std::size_t r) {
    return In(data + first[r], static_cast<std::size_t>(first[r + 1] - first[r]));
  };
  std::vector<Out> send(n, stretch(me));
  std::vector<In> recv;
  for (std::size_t r = 0; r < n; ++r) recv.push_back(stretch(r));
  // The own stretch is in place.
  send[me] = {};
  recv[me] = {};
  return messages_.exchange(stream, "gather", send, recv);
}

std::int64_t DeviceReplicas::bytes() const {
  return buffers_->parts.bytes() + buffers_->sum.bytes();
}

}  // namespace moesaic::cuda
