// One collective step of a transport in which any rank may refuse to take part: it then sends the
// reason in place of its rows, and all ranks return that reason at once instead of waiting for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/status.h"

namespace moesaic::prepare_finalize {

// In front of every message.
struct MessageHeader {
  std::int32_t code = 0;  // StatusCode of a sender that refuses; its text follows
  std::int32_t rows = 0;  // how many rows follow
};
inline constexpr std::int64_t kHeaderBytes = sizeof(MessageHeader);

// Memory of a step's messages, kept from call to call.
class ExchangeBuffers {
 private:
  friend class RankExchange;
  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    std::size_t capacity = 0, bytes = 0;
    void reset(std::int64_t payload);
  };
  std::vector<Buffer> out_, in_;
};

// Use: expect() for every rank, message() for every rank (or to_all()), send(), receive(), then
// rows() and payload(). May throw std::bad_alloc. One object per step, with buffers of its own.
class RankExchange {
 public:
  RankExchange(Communicator& communicator, std::string_view what, ExchangeBuffers& buffers);

  // At most this many bytes of payload come from rank r.
  void expect(int r, std::int64_t bytes);
  // Payload of `bytes` for rank r, to be filled before run().
  std::byte* message(int r, std::int64_t rows, std::int64_t bytes);
  // One payload for all ranks.
  std::byte* to_all(std::int64_t rows, std::int64_t bytes);
  // Takes part with a refusal, and waits. Returns the reason that all ranks return: `reason`, or that of a
  // lower rank that refuses as well; every rank that was expected must be expected here too.
  Status refuse(const Status& reason);

  // The messages are on their way; waits for nobody.
  Status send();
  // Waits for those of the others. Errors: those of the communicator; the code and text of the
  // lowest rank that refused, with "dispatch: rank 3: " in front.
  Status receive();
  std::int64_t rows(int r) const { return headers_[static_cast<std::size_t>(r)].rows; }
  std::span<const std::byte> payload(int r) const;

 private:
  using Buffer = ExchangeBuffers::Buffer;
  std::byte* start(Buffer& buffer, MessageHeader header, std::int64_t bytes) const;
  Status read_headers();

  Communicator& comm_;
  std::string_view what_;
  std::vector<Buffer>& out_;
  std::vector<Buffer>& in_;
  std::vector<std::size_t> source_;  // which out_ goes to a rank
  std::vector<std::int64_t> received_;
  std::vector<MessageHeader> headers_;
  std::unique_ptr<PendingExchange> pending_;  // last: it may still write what stands above
};

}  // namespace moesaic::prepare_finalize
