// What every Communicator makes of its exchange: groups that are asked for again, a barrier, sums. Memory
// that one rank lacks is told to the others, who wait for it.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "parallel/transport.h"

namespace moesaic {
namespace {

using Out = std::span<const std::byte>;
using In = std::span<std::byte>;

constexpr std::string_view kNoMemory = "out of memory";

// Where nothing can be started: it is over.
class FinishedExchange final : public PendingExchange {
 public:
  explicit FinishedExchange(Status status) : status_(std::move(status)) {}
  Status complete() override { return status_; }

 private:
  Status status_;
};

}  // namespace

Result<std::shared_ptr<Communicator>> Communicator::shared_subgroup(std::span<const int> ranks,
                                                                    int id) {
  const auto same = [&](const SharedGroup& g) {
    return g.id == id && std::equal(ranks.begin(), ranks.end(), g.ranks.begin(), g.ranks.end());
  };
  const auto known = std::find_if(shared_groups_.begin(), shared_groups_.end(), same);
  // All its members know when a group is broken while its world is not, so all replace it alike.
  if (known != shared_groups_.end() && known->group->state().ok()) return known->group;
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> made, subgroup(ranks, id));
  std::shared_ptr<Communicator> group = std::move(made);
  if (known != shared_groups_.end()) {
    known->group = group;
  } else {
    shared_groups_.push_back({{ranks.begin(), ranks.end()}, id, group});
  }
  return group;
}

Result<std::unique_ptr<PendingExchange>> Communicator::start_exchange(
    std::string_view what, std::span<const std::span<const std::byte>> send,
    std::span<const std::span<std::byte>> recv, std::span<std::int64_t> received) {
  std::unique_ptr<PendingExchange> over(new (std::nothrow)
                                            FinishedExchange(exchange(what, send, recv, received)));
  if (!over) return abandon(fmt::format("{}: out of memory", what));
  return over;
}

Status Communicator::barrier(std::string_view what) {
  try {
    const auto n = static_cast<std::size_t>(size());
    return exchange(what, std::vector<Out>(n), std::vector<In>(n));
  } catch (const std::bad_alloc&) {
    return abandon(kNoMemory);
  }
}

Result<std::vector<std::int64_t>> Communicator::all_gather(std::string_view what,
                                                           std::int64_t value) {
  try {
    const auto n = static_cast<std::size_t>(size());
    std::vector<std::int64_t> all(n, 0);
    const std::vector<Out> send(n, std::as_bytes(std::span(&value, 1)));
    std::vector<In> recv;
    recv.reserve(n);
    for (std::int64_t& v : all) recv.push_back(std::as_writable_bytes(std::span(&v, 1)));
    MOESAIC_RETURN_IF_ERROR(exchange(what, send, recv));
    return all;
  } catch (const std::bad_alloc&) {
    return abandon(kNoMemory);
  }
}

Status Communicator::all_reduce_sum(std::string_view what, std::span<float> values) {
  const auto n = static_cast<std::size_t>(size());
  if (n == 1) return state();
  // Rank r sums the r-th part of all ranks' values in rank order and sends the sum to all.
  const auto part = [&](std::size_t r) {
    const std::size_t first = values.size() * r / n;
    return values.subspan(first, values.size() * (r + 1) / n - first);
  };
  const auto mine = part(static_cast<std::size_t>(rank()));
  try {
    std::vector<float> parts(n * mine.size());
    std::vector<Out> send;
    std::vector<In> recv;
    for (std::size_t r = 0; r < n; ++r) {
      send.push_back(std::as_bytes(part(r)));
      recv.push_back(
          std::as_writable_bytes(std::span(parts).subspan(r * mine.size(), mine.size())));
    }
    MOESAIC_RETURN_IF_ERROR(exchange(what, send, recv));
    std::vector<float> sum(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(mine.size()));
    for (std::size_t r = 1; r < n; ++r) {
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += parts[r * mine.size() + i];
    }
    send.assign(n, std::as_bytes(std::span<const float>(sum)));
    recv.clear();
    for (std::size_t r = 0; r < n; ++r) recv.push_back(std::as_writable_bytes(part(r)));
    return exchange(what, send, recv);
  } catch (const std::bad_alloc&) {
    return abandon(kNoMemory);
  }
}

}  // namespace moesaic
