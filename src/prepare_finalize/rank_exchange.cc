#include "prepare_finalize/rank_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace moesaic::prepare_finalize {
namespace {
// Bytes of a refusal's text; every message has room for it.
constexpr std::int64_t kMaxText = 504;
}  // namespace

void ExchangeBuffers::Buffer::reset(std::int64_t payload) {
  bytes = static_cast<std::size_t>(kHeaderBytes + payload);
  if (bytes <= capacity) return;
  capacity = 0;
  data = std::make_unique_for_overwrite<std::byte[]>(bytes);
  capacity = bytes;
}

RankExchange::RankExchange(Communicator& communicator, std::string_view what,
                           ExchangeBuffers& buffers)
    : comm_(communicator), what_(what), out_(buffers.out_), in_(buffers.in_) {
  const auto n = static_cast<std::size_t>(comm_.size());
  out_.resize(n);
  in_.resize(n);
  source_.resize(n);
  received_.resize(n);
  headers_.resize(n);
}

void RankExchange::expect(int r, std::int64_t bytes) {
  in_[static_cast<std::size_t>(r)].reset(std::max(bytes, kMaxText));
}

std::byte* RankExchange::start(Buffer& buffer, MessageHeader header, std::int64_t bytes) const {
  buffer.reset(bytes);
  std::memcpy(buffer.data.get(), &header, sizeof(header));
  return buffer.data.get() + kHeaderBytes;
}

std::byte* RankExchange::message(int r, std::int64_t rows, std::int64_t bytes) {
  const auto i = static_cast<std::size_t>(r);
  source_[i] = i;
  return start(out_[i], {0, static_cast<std::int32_t>(rows)}, bytes);
}

std::byte* RankExchange::to_all(std::int64_t rows, std::int64_t bytes) {
  std::fill(source_.begin(), source_.end(), 0);
  return start(out_[0], {0, static_cast<std::int32_t>(rows)}, bytes);
}

Status RankExchange::refuse(const Status& reason) {
  const std::string text = reason.message().substr(0, static_cast<std::size_t>(kMaxText));
  std::fill(source_.begin(), source_.end(), 0);
  std::byte* to = start(out_[0], {static_cast<std::int32_t>(reason.code()), 0},
                        static_cast<std::int64_t>(text.size()));
  std::memcpy(to, text.data(), text.size());
  MOESAIC_RETURN_IF_ERROR(send());
  const Status status = receive();
  return status.ok() ? reason : status;
}

Status RankExchange::send() {
  std::vector<std::span<const std::byte>> out_spans;
  std::vector<std::span<std::byte>> recv;
  for (std::size_t r = 0; r < in_.size(); ++r) {
    const Buffer& out = out_[source_[r]];
    out_spans.emplace_back(out.data.get(), out.bytes);
    recv.emplace_back(in_[r].data.get(), in_[r].bytes);
  }
  MOESAIC_ASSIGN_OR_RETURN(pending_, comm_.start_exchange(what_, out_spans, recv, received_));
  return {};
}

Status RankExchange::receive() {
  const Status status = pending_->complete();
  pending_ = nullptr;
  MOESAIC_RETURN_IF_ERROR(status);
  return read_headers();
}

Status RankExchange::read_headers() {
  Status refused;
  for (std::size_t r = 0; r < in_.size(); ++r) {
    const auto length = static_cast<std::size_t>(received_[r]);
    if (length < sizeof(MessageHeader)) {
      return comm_.abandon(fmt::format("{}: rank {} sent {} bytes, need at least {}", what_, r,
                                       length, kHeaderBytes));
    }
    std::memcpy(&headers_[r], in_[r].data.get(), sizeof(MessageHeader));
    const MessageHeader& h = headers_[r];
    if (h.code < 0 || h.code > static_cast<int>(StatusCode::kInternal) || h.rows < 0) {
      return comm_.abandon(
          fmt::format("{}: rank {} sent a header with code {} and {} rows, need both >= 0", what_,
                      r, h.code, h.rows));
    }
    if (h.code == 0 || !refused.ok()) continue;
    const auto text = payload(static_cast<int>(r));
    refused = Status(
        static_cast<StatusCode>(h.code),
        fmt::format("{}: rank {}: {}", what_, r,
                    std::string_view(reinterpret_cast<const char*>(text.data()), text.size())));
  }
  return refused;
}

std::span<const std::byte> RankExchange::payload(int r) const {
  const auto i = static_cast<std::size_t>(r);
  return std::span<const std::byte>(in_[i].data.get(), static_cast<std::size_t>(received_[i]))
      .subspan(sizeof(MessageHeader));
}

}  // namespace moesaic::prepare_finalize
