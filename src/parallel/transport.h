// What a medium must offer so that GroupCommunicator can do the rest: ordered messages between two
// ranks, posted and polled without ever waiting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/status.h"

namespace moesaic {

using Message = std::vector<std::byte>;

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
  // No clean shutdown is possible any more.
  virtual void abandon() {}
};

std::unique_ptr<Communicator> make_group_communicator(std::unique_ptr<Transport> transport,
                                                      const CommunicatorOptions& options);

}  // namespace moesaic
