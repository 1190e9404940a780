// Another communicator of which long messages arrive as zeros; short ones as they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "moesaic/communicator.h"

namespace moesaic::test {

class GarblingCommunicator final : public Communicator {
 public:
  // Messages of `bytes` and more are long.
  GarblingCommunicator(Communicator& real, std::size_t bytes) : real_(real), bytes_(bytes) {}
  std::string_view name() const override { return real_.name(); }
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  Status state() const override { return real_.state(); }
  std::int64_t bytes_sent() const override { return real_.bytes_sent(); }
  Status exchange(std::string_view what, std::span<const std::span<const std::byte>> send,
                  std::span<const std::span<std::byte>> recv,
                  std::span<std::int64_t> received) override {
    const Status status = real_.exchange(what, send, recv, received);
    for (const std::span<std::byte> message : recv) {
      if (message.size() >= bytes_) std::fill(message.begin(), message.end(), std::byte{0});
    }
    return status;
  }
  Status abandon(std::string_view reason) override { return real_.abandon(reason); }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks, int id) override {
    return real_.subgroup(ranks, id);
  }

 private:
  Communicator& real_;
  std::size_t bytes_;
};

}  // namespace moesaic::test
