// The one Communicator over any Transport: sizes, order, deadlines, and telling all ranks of a failure.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "core/hash.h"
#include "parallel/transport.h"

namespace moesaic::parallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kAbortTag = 0;  // subgroup ids are data tags 2 ..; the whole world is 1
constexpr int kWorldTag = 1;
constexpr int kMaxGroupId = 1000;

// In front of every payload: enough to notice that two ranks are not in the same call.
struct Header {
  std::uint64_t sequence = 0;
  std::uint64_t what = 0;
};

// Shared by a communicator and its subgroups.
struct World {
  std::unique_ptr<Transport> transport;
  CommunicatorOptions options;
  Status failure;
  int exchanges = 0;  // started and not completed

  Status fail(std::string text, bool tell_others) {
    if (failure.ok()) {
      failure = Status(StatusCode::kDevice, std::move(text));
      if (tell_others) {
        const std::string& m = failure.message();
        const auto* bytes = reinterpret_cast<const std::byte*>(m.data());
        for (int r = 0; r < transport->size(); ++r) {
          if (r == transport->rank()) continue;
          // They time out by themselves if this does not reach them.
          static_cast<void>(transport->post(r, kAbortTag, Message(bytes, bytes + m.size())));
        }
      }
      transport->abandon();
    }
    return failure;
  }
};

class GroupCommunicator;

// An exchange of a group: what this rank still waits for.
class GroupExchange final : public PendingExchange {
 public:
  GroupExchange(GroupCommunicator& group, std::string_view what, Header header,
                std::span<const std::span<std::byte>> recv, std::span<std::int64_t> received);
  GroupExchange(const GroupExchange&) = delete;
  GroupExchange& operator=(const GroupExchange&) = delete;
  ~GroupExchange() override;
  Status complete() override;

  const std::string what;
  const Header header;
  const std::vector<std::span<std::byte>> recv;
  const std::span<std::int64_t> received;
  std::vector<std::size_t> waiting;  // members whose message has not come

 private:
  GroupCommunicator& group_;
  bool over_ = false;
};

class GroupCommunicator final : public Communicator {
 public:
  GroupCommunicator(std::shared_ptr<World> world, std::vector<int> ranks, int rank, int tag)
      : world_(std::move(world)), ranks_(std::move(ranks)), rank_(rank), tag_(tag) {}

  std::string_view name() const override { return world_->transport->name(); }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  Status state() const override { return world_->failure; }
  std::int64_t bytes_sent() const override { return bytes_sent_; }
  int timeout_ms() const override { return world_->options.timeout_ms; }

  bool overlaps() const override { return true; }

  Status exchange(std::string_view what, std::span<const std::span<const std::byte>> send,
                  std::span<const std::span<std::byte>> recv,
                  std::span<std::int64_t> received) override {
    MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<PendingExchange> started,
                             start_exchange(what, send, recv, received));
    return started->complete();
  }

  Result<std::unique_ptr<PendingExchange>> start_exchange(
      std::string_view what, std::span<const std::span<const std::byte>> send,
      std::span<const std::span<std::byte>> recv, std::span<std::int64_t> received) override {
    if (!world_->failure.ok()) return world_->failure;
    const auto n = ranks_.size();
    if (send.size() != n || recv.size() != n || (!received.empty() && received.size() != n)) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{}: got {} messages to send and {} to receive, need {} of each",
                                what, send.size(), recv.size(), n));
    }
    std::unique_ptr<GroupExchange> x;  // ends behind the reason why it did not start
    try {
      x = std::make_unique<GroupExchange>(*this, what, Header{++sequence_, fnv1a(what)}, recv,
                                          received);
      MOESAIC_RETURN_IF_ERROR(send_all(*x, send));
      return std::unique_ptr<PendingExchange>(std::move(x));
    } catch (const std::exception& error) {  // memory for a message
      return world_->fail(fmt::format("rank {}: {}: {}", me(), what, error.what()), true);
    }
  }

  Status complete(GroupExchange& x) {
    if (!world_->failure.ok()) return world_->failure;
    try {
      return receive_all(x);
    } catch (const std::exception& error) {
      return world_->fail(fmt::format("rank {}: {}: {}", me(), x.what, error.what()), true);
    }
  }
  void add(GroupExchange& x) {
    started_.push_back(&x);
    ++world_->exchanges;
  }
  void remove(const GroupExchange& x, bool completed) {
    std::erase(started_, &x);
    --world_->exchanges;
    if (completed || !world_->failure.ok()) return;
    static_cast<void>(
        world_->fail(fmt::format("rank {}: {}: was started and given up", me(), x.what), true));
  }

  Status abandon(std::string_view reason) override {
    return world_->fail(fmt::format("rank {}: {}", me(), reason), true);
  }

  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int> ranks, int id) override {
    if (id < 1 || id > kMaxGroupId) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("id: got {}, need 1 .. {}", id, kMaxGroupId));
    }
    std::vector<int> members;
    int mine = -1;
    for (const int r : ranks) {
      if (r < 0 || r >= size() ||
          std::find(members.begin(), members.end(), ranks_[static_cast<std::size_t>(r)]) !=
              members.end()) {
        return Status(StatusCode::kInvalidArgument,
                      fmt::format("ranks: got {}, need distinct ranks below {}", r, size()));
      }
      if (r == rank_) mine = static_cast<int>(members.size());
      members.push_back(ranks_[static_cast<std::size_t>(r)]);
    }
    if (mine < 0) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("ranks: rank {} itself is not among them", rank_));
    }
    return std::unique_ptr<Communicator>(
        new GroupCommunicator(world_, std::move(members), mine, kWorldTag + id));
  }

 private:
  int me() const { return world_->transport->rank(); }

  Status send_all(GroupExchange& x, std::span<const std::span<const std::byte>> send) {
    Transport& t = *world_->transport;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (static_cast<int>(i) == rank_) continue;
      const std::size_t bytes = MOESAIC_FAULT(communicator_drops_last_byte) && !send[i].empty()
                                    ? send[i].size() - 1
                                    : send[i].size();
      Message m = t.pool().take(sizeof(Header) + bytes);
      std::memcpy(m.data(), &x.header, sizeof(Header));
      if (bytes > 0) std::memcpy(m.data() + sizeof(Header), send[i].data(), bytes);
      bytes_sent_ += static_cast<std::int64_t>(bytes);
      const Status posted = t.post(ranks_[i], tag_, std::move(m));
      if (!posted.ok()) return world_->fail(posted.message(), true);
      x.waiting.push_back(i);
    }
    const auto own = static_cast<std::size_t>(rank_);
    return deliver(x, own, send[own]);
  }

  // Messages of a member come in the order in which the exchanges were started: the next one is for
  // the first of them that still waits for it, whichever is being completed.
  GroupExchange& next_from(std::size_t member, GroupExchange& completing) {
    if (MOESAIC_FAULT(communicator_message_of_another_exchange)) return completing;
    for (GroupExchange* x : started_) {
      if (std::find(x->waiting.begin(), x->waiting.end(), member) != x->waiting.end()) return *x;
    }
    return completing;
  }

  Status receive_all(GroupExchange& x) {
    const auto deadline =
        Clock::now() + std::chrono::milliseconds(std::max(world_->options.timeout_ms, 1));
    Transport& t = *world_->transport;
    for (int round = 0;; ++round) {
      for (std::size_t w = 0; w < x.waiting.size();) {
        const std::size_t i = x.waiting[w];
        Result<std::optional<Message>> m = t.poll(ranks_[i], tag_);
        if (!m.ok()) return world_->fail(m.status().message(), true);
        if (!m->has_value()) {
          ++w;
          continue;
        }
        GroupExchange& to = next_from(i, x);
        MOESAIC_RETURN_IF_ERROR(take(to, i, **m));
        t.pool().give(std::move(**m));
        std::erase(to.waiting, i);
      }
      const Result<bool> sent = t.all_sent();
      if (!sent.ok()) return world_->fail(sent.status().message(), true);
      // While other exchanges are under way, theirs may be what has not left: the peer takes it when
      // it completes them.
      if (x.waiting.empty() && (*sent || world_->exchanges > 1)) return {};
      MOESAIC_RETURN_IF_ERROR(look_for_bad_news());
      if (Clock::now() > deadline) return world_->fail(late(x.what, x.waiting), true);
      // Ranks may share cores: give way at once, and sleep when it takes long.
      if (round < 200) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(round < 2000 ? 20 : 500));
      }
    }
  }

  std::string late(std::string_view what, const std::vector<std::size_t>& waiting) const {
    std::string who;
    for (const std::size_t i : waiting) who += fmt::format(" {}", ranks_[i]);
    if (who.empty()) who = " (a message could not be delivered)";
    return fmt::format("rank {}: {}: nothing within {} ms from rank(s){}", me(), what,
                       world_->options.timeout_ms, who);
  }

  Status look_for_bad_news() {
    Transport& t = *world_->transport;
    for (int r = 0; r < t.size(); ++r) {
      if (r == t.rank()) continue;
      Result<std::optional<Message>> m = t.poll(r, kAbortTag);
      if (!m.ok()) return world_->fail(m.status().message(), false);
      if (!m->has_value()) continue;
      return world_->fail(std::string(reinterpret_cast<const char*>((*m)->data()), (*m)->size()),
                          false);
    }
    return {};
  }

  Status take(GroupExchange& x, std::size_t from, const Message& m) {
    Header theirs;
    if (m.size() >= sizeof(Header)) std::memcpy(&theirs, m.data(), sizeof(Header));
    if (theirs.sequence != x.header.sequence || theirs.what != x.header.what) {
      return world_->fail(
          fmt::format("rank {}: {} (call {}): rank {} is in another call ({})", me(), x.what,
                      x.header.sequence, ranks_[from], theirs.sequence),
          true);
    }
    return deliver(x, from, std::span(m).subspan(sizeof(Header)));
  }

  Status deliver(const GroupExchange& x, std::size_t from, std::span<const std::byte> payload) {
    const std::span<std::byte> to = x.recv[from];
    const bool fits =
        x.received.empty() ? payload.size() == to.size() : payload.size() <= to.size();
    if (!fits) {
      return world_->fail(
          fmt::format("rank {}: {}: rank {} sent {} bytes, need {}{}", me(), x.what, ranks_[from],
                      payload.size(), x.received.empty() ? "" : "at most ", to.size()),
          true);
    }
    if (!payload.empty()) std::memcpy(to.data(), payload.data(), payload.size());
    if (!x.received.empty()) x.received[from] = static_cast<std::int64_t>(payload.size());
    return {};
  }

  std::shared_ptr<World> world_;
  std::vector<int> ranks_;  // of the world
  int rank_;
  int tag_;
  std::vector<GroupExchange*> started_;  // not completed, in the order of their starts
  std::uint64_t sequence_ = 0;
  std::int64_t bytes_sent_ = 0;
};

GroupExchange::GroupExchange(GroupCommunicator& group, std::string_view name, Header numbers,
                             std::span<const std::span<std::byte>> to,
                             std::span<std::int64_t> lengths)
    : what(name), header(numbers), recv(to.begin(), to.end()), received(lengths), group_(group) {
  group_.add(*this);
}
GroupExchange::~GroupExchange() {
  if (over_) return;
  try {
    group_.remove(*this, /*completed=*/false);
  } catch (const std::bad_alloc&) {  // the news: the others find out when they wait
  }
}
Status GroupExchange::complete() {
  if (over_) return {StatusCode::kInternal, fmt::format("{}: completed twice", what)};
  Status status = group_.complete(*this);
  over_ = true;
  group_.remove(*this, /*completed=*/true);
  return status;
}

}  // namespace

std::unique_ptr<Communicator> make_group_communicator(std::unique_ptr<Transport> transport,
                                                      const CommunicatorOptions& options) {
  std::vector<int> ranks(static_cast<std::size_t>(transport->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const int rank = transport->rank();
  auto world = std::make_shared<World>();
  world->transport = std::move(transport);
  world->options = options;
  return std::make_unique<GroupCommunicator>(std::move(world), std::move(ranks), rank, kWorldTag);
}

}  // namespace moesaic::parallel
