// Exchanges in two halves: several under way, completed in any order.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "moesaic/communicator.h"
#include "support/hang_guard.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using Out = std::span<const std::byte>;
using In = std::span<std::byte>;

void run_started_ranks(int size, const CommunicatorOptions& options,
                       const std::function<void(Communicator&)>& body) {
  auto ranks = make_in_process_communicators(size, options).value();
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank, &body] { body(*rank); });
  for (std::thread& t : threads) t.join();
}

// Exchange number n: every rank sends the one byte 16 n + its rank to all.
struct Numbered {
  Numbered(Communicator& c, int number)
      : size(static_cast<std::size_t>(c.size())), n(number), in(size, std::byte{0xFF}) {
    const auto mine = static_cast<std::byte>(16 * n + c.rank());
    const std::vector<Out> send(size, Out(&mine, 1));
    std::vector<In> recv;
    for (std::byte& b : in) recv.emplace_back(&b, 1);
    pending = c.start_exchange("number " + std::to_string(n), send, recv).value();
  }
  void expect_all() {
    const Status status = pending->complete();
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::size_t r = 0; r < size; ++r) {
      EXPECT_EQ(in[r], static_cast<std::byte>(16 * static_cast<std::size_t>(n) + r));
    }
  }
  std::size_t size;
  int n;
  std::vector<std::byte> in;
  std::unique_ptr<PendingExchange> pending;
};

TEST(StartedExchange, CompletesInAnyOrderWithOthersInBetween) {
  run_started_ranks(4, {.timeout_ms = test::kHangGuardMs}, [](Communicator& c) {
    EXPECT_TRUE(c.overlaps());
    const std::vector<int> pair = {c.rank() / 2 * 2, c.rank() / 2 * 2 + 1};
    const auto group = c.subgroup(pair, 1).value();
    for (int repeat = 0; repeat < 20; ++repeat) {
      Numbered first(c, 1), second(c, 2);
      Numbered of_group(*group, 3);
      EXPECT_EQ(c.all_gather("between", c.rank()).value(), (std::vector<std::int64_t>{0, 1, 2, 3}));
      Numbered third(c, 4);
      // Each rank in an order of its own.
      std::vector<Numbered*> all = {&first, &second, &of_group, &third};
      std::rotate(all.begin(), all.begin() + c.rank(), all.end());
      for (Numbered* x : all) x->expect_all();
    }
    EXPECT_TRUE(c.barrier("end").ok());
  });
}

// Rank 1 begins when rank 0 has started its exchange: a start that waited would never end.
TEST(StartedExchange, AStartWaitsForNobody) {
  std::atomic<bool> started = false;
  run_started_ranks(2, {.timeout_ms = test::kHangGuardMs}, [&](Communicator& c) {
    while (c.rank() == 1 && !started) std::this_thread::yield();
    Numbered x(c, 5);
    if (c.rank() == 0) started = true;
    x.expect_all();
  });
}

TEST(StartedExchange, OneThatIsGivenUpBreaksTheCommunicator) {
  run_started_ranks(3, {.timeout_ms = test::kHangGuardMs}, [](Communicator& c) {
    {
      Numbered x(c, 6);
      if (c.rank() == 1) x.pending = nullptr;
      if (c.rank() != 1) static_cast<void>(x.pending->complete());
    }
    expect_refusal(c.barrier("next"), StatusCode::kDevice, {"rank 1", "number 6", "given up"});
  });
}

TEST(StartedExchange, EachIsCompletedOnce) {
  const auto self = std::move(make_in_process_communicators(1).value().front());
  Numbered x(*self, 7);
  x.expect_all();
  expect_refusal(x.pending->complete(), StatusCode::kInternal, {"number 7", "twice"});
  expect_refusal(self->start_exchange("bad", std::vector<Out>(2), std::vector<In>(1)).status(),
                 StatusCode::kInvalidArgument, {"bad", "need 1"});
}

// What cannot start an exchange makes it at once, and says so.
class AtOnce final : public Communicator {
 public:
  std::string_view name() const override { return "at_once"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Status state() const override { return {}; }
  std::int64_t bytes_sent() const override { return 0; }
  Status exchange(std::string_view, std::span<const Out> send, std::span<const In> recv,
                  std::span<std::int64_t>) override {
    std::copy(send[0].begin(), send[0].end(), recv[0].begin());
    return {StatusCode::kDevice, "made"};
  }
  Status abandon(std::string_view reason) override {
    return {StatusCode::kDevice, std::string(reason)};
  }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int>, int) override {
    return std::unique_ptr<Communicator>(new AtOnce);
  }
};

TEST(StartedExchange, ACommunicatorWithoutOneMakesItAtOnce) {
  AtOnce c;
  EXPECT_FALSE(c.overlaps());
  const Numbered x(c, 0);
  EXPECT_EQ(x.in[0], std::byte{0});
  expect_refusal(x.pending->complete(), StatusCode::kDevice, {"made"});
}

}  // namespace
}  // namespace moesaic
