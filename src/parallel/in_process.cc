// Ranks that are threads of one process, and the world of one rank.
#include <fmt/format.h>

#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "parallel/transport.h"

namespace moesaic {
namespace {

struct Mailboxes {
  std::mutex mutex;
  std::map<std::tuple<int, int, int>, std::deque<parallel::Message>> queue;  // from, to, tag
};

class InProcessTransport final : public parallel::Transport {
 public:
  InProcessTransport(std::shared_ptr<Mailboxes> boxes, int rank, int size)
      : boxes_(std::move(boxes)), rank_(rank), size_(size) {}

  std::string_view name() const override { return size_ == 1 ? "self" : "in_process"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Status post(int to, int tag, parallel::Message message) override {
    const std::lock_guard<std::mutex> lock(boxes_->mutex);
    boxes_->queue[{rank_, to, tag}].push_back(std::move(message));
    return {};
  }
  Result<std::optional<parallel::Message>> poll(int from, int tag) override {
    const std::lock_guard<std::mutex> lock(boxes_->mutex);
    const auto box = boxes_->queue.find({from, rank_, tag});
    if (box == boxes_->queue.end() || box->second.empty())
      return std::optional<parallel::Message>();
    std::optional<parallel::Message> m = std::move(box->second.front());
    box->second.pop_front();
    return m;
  }
  Result<bool> all_sent() override { return true; }

 private:
  std::shared_ptr<Mailboxes> boxes_;
  int rank_, size_;
};

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> make_in_process_communicators(
    int size, const CommunicatorOptions& options) {
  if (size < 1 || size > 4096) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("size: got {}, need 1 .. 4096 ranks", size));
  }
  std::vector<std::unique_ptr<Communicator>> ranks;
  ranks.reserve(static_cast<std::size_t>(size));
  const auto boxes = std::make_shared<Mailboxes>();
  for (int r = 0; r < size; ++r) {
    ranks.push_back(parallel::make_group_communicator(
        std::make_unique<InProcessTransport>(boxes, r, size), options));
  }
  return ranks;
}

}  // namespace moesaic
