// What a medium must offer so that GroupCommunicator can do the rest: ordered messages between two
// ranks, posted and polled without ever waiting.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/status.h"

namespace moesaic::parallel {

// Leaves new bytes unwritten: a message is filled right after it is made.
template <class T>
struct UnwrittenAllocator : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = UnwrittenAllocator<U>;
  };
  template <class U, class... Args>
  void construct(U* p, Args&&... args) {
    if constexpr (sizeof...(Args) == 0) {
      ::new (static_cast<void*>(p)) U;
    } else {
      ::new (static_cast<void*>(p)) U(std::forward<Args>(args)...);
    }
  }
};
using Message = std::vector<std::byte, UnwrittenAllocator<std::byte>>;

// Messages that have done their work, for the next ones: fresh memory costs a page fault every 4
// KiB, which is most of the time of a large message.
class MessagePool {
 public:
  Message take(std::size_t bytes) {
    Message m;
    if (!spare_.empty()) {
      auto best = std::find_if(spare_.begin(), spare_.end(),
                               [bytes](const Message& s) { return s.capacity() >= bytes; });
      if (best == spare_.end()) best = spare_.begin();
      m = std::move(*best);
      spare_.erase(best);
    }
    m.clear();  // so that growing copies nothing
    m.resize(bytes);
    return m;
  }
  void give(Message message) {
    if (spare_.size() < kMost) spare_.push_back(std::move(message));
  }

 private:
  static constexpr std::size_t kMost = 64;
  std::vector<Message> spare_;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Keeps the message until it is delivered; never waits. Messages from one rank to another with
  // one tag arrive in order.
  virtual Status post(int to, int tag, Message message) = 0;
  // The next message, if one is there.
  virtual Result<std::optional<Message>> poll(int from, int tag) = 0;
  // Whether everything posted has left this rank.
  virtual Result<bool> all_sent() = 0;
  // Called when a failure has broken the world: the destructor must not wait for peers.
  virtual void abandon() {}
  // For posted messages that were sent, and polled ones that were read.
  MessagePool& pool() { return pool_; }

 private:
  MessagePool pool_;
};

std::unique_ptr<Communicator> make_group_communicator(std::unique_ptr<Transport> transport,
                                                      const CommunicatorOptions& options);

}  // namespace moesaic::parallel
