#include "moesaic/communicator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "support/hang_guard.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using Out = std::span<const std::byte>;
using In = std::span<std::byte>;

// One thread per rank.
void run_ranks(int size, const CommunicatorOptions& options,
               const std::function<void(Communicator&)>& body) {
  auto ranks = make_in_process_communicators(size, options).value();
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank, &body] { body(*rank); });
  for (std::thread& t : threads) t.join();
}

// Message r -> s is r + 1 copies of the byte 16 r + s.
TEST(Communicator, ExchangeDeliversToEveryRank) {
  run_ranks(5, {}, [](Communicator& c) {
    const auto n = static_cast<std::size_t>(c.size());
    const auto me = static_cast<std::size_t>(c.rank());
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<std::vector<std::byte>> out(n);
      std::vector<std::vector<std::byte>> in(n);
      std::vector<Out> send(n);
      std::vector<In> recv(n);
      for (std::size_t r = 0; r < n; ++r) {
        out[r].assign(me + 1, static_cast<std::byte>(16 * me + r));
        in[r].assign(r + 1, std::byte{0xFF});
        send[r] = out[r];
        recv[r] = in[r];
      }
      const Status status = c.exchange("test", send, recv);
      ASSERT_TRUE(status.ok()) << status.message();
      for (std::size_t r = 0; r < n; ++r) {
        EXPECT_EQ(in[r], std::vector<std::byte>(r + 1, static_cast<std::byte>(16 * r + me)));
      }
    }
    EXPECT_EQ(c.bytes_sent(), static_cast<std::int64_t>(20 * 4 * (me + 1)));
  });
}

TEST(Communicator, ReductionAddsInRankOrderWithTheSameBitsEverywhere) {
  for (const int size : {1, 2, 3, 4, 7}) {
    std::vector<std::vector<float>> inputs;
    test::Rng rng(3);
    for (int r = 0; r < size; ++r) {
      inputs.emplace_back();
      for (int i = 0; i < 37; ++i) inputs.back().push_back(static_cast<float>(rng.normal()));
    }
    std::vector<float> want = inputs[0];
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      for (std::size_t i = 0; i < want.size(); ++i) want[i] += inputs[r][i];
    }
    run_ranks(size, {}, [&](Communicator& c) {
      std::vector<float> values = inputs[static_cast<std::size_t>(c.rank())];
      ASSERT_TRUE(c.all_reduce_sum("sum", values).ok());
      EXPECT_EQ(values, want);
      const auto all = c.all_gather("ranks", c.rank() * 10).value();
      for (std::size_t r = 0; r < all.size(); ++r) {
        EXPECT_EQ(all[r], static_cast<std::int64_t>(10 * r));
      }
      EXPECT_TRUE(c.barrier("end").ok());
    });
  }
}

TEST(Communicator, SubgroupsWorkSideBySide) {
  run_ranks(6, {}, [](Communicator& c) {
    const int column = c.rank() % 2;
    const std::vector<int> across = {column, column + 2, column + 4};
    const std::vector<int> row = {c.rank() / 2 * 2, c.rank() / 2 * 2 + 1};
    const auto a = c.subgroup(across, 1).value();
    const auto b = c.subgroup(row, 2).value();
    EXPECT_EQ(a->rank(), c.rank() / 2);
    EXPECT_EQ(b->size(), 2);
    std::vector<float> sum = {static_cast<float>(c.rank())};
    ASSERT_TRUE(a->all_reduce_sum("across", sum).ok());
    EXPECT_EQ(sum[0], static_cast<float>(3 * column + 6));
    ASSERT_TRUE(b->all_reduce_sum("row", sum).ok());
    EXPECT_EQ(sum[0], 15.0F);
    expect_refusal(c.subgroup(std::vector<int>{(c.rank() + 1) % 6}, 3).status(),
                   StatusCode::kInvalidArgument, {"itself"});
    expect_refusal(c.subgroup(std::vector<int>{0, 0}, 3).status(), StatusCode::kInvalidArgument,
                   {"distinct"});
    expect_refusal(c.subgroup(across, 0).status(), StatusCode::kInvalidArgument, {"id: got 0"});
    EXPECT_TRUE(c.barrier("end").ok());
  });
}

TEST(Communicator, ASharedSubgroupIsMadeOnce) {
  run_ranks(4, {}, [](Communicator& c) {
    const std::vector<int> pair = {c.rank() / 2 * 2, c.rank() / 2 * 2 + 1};
    const std::vector<int> across = {c.rank() % 2, c.rank() % 2 + 2};
    const auto group = c.shared_subgroup(pair, 1).value();
    EXPECT_EQ(group->all_gather("pair", c.rank()).value(),
              (std::vector<std::int64_t>{pair[0], pair[1]}));
    EXPECT_EQ(c.shared_subgroup(pair, 1).value(), group);
    EXPECT_NE(c.shared_subgroup(pair, 2).value(), group);
    // Other ranks with an id that is in use already, as two layers with other sizes have them.
    const auto other = c.shared_subgroup(across, 1).value();
    EXPECT_EQ(other->all_gather("across", c.rank()).value(),
              (std::vector<std::int64_t>{across[0], across[1]}));
    EXPECT_EQ(group->all_gather("pair again", c.rank()).value(),
              (std::vector<std::int64_t>{pair[0], pair[1]}));
    expect_refusal(c.shared_subgroup(pair, 0).status(), StatusCode::kInvalidArgument,
                   {"id: got 0"});
    EXPECT_TRUE(c.barrier("end").ok());
  });
}

// A communicator of one rank that can be broken by itself, as a group of GPUs can.
class BreakableGroup final : public Communicator {
 public:
  std::string_view name() const override { return "breakable"; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Status state() const override { return state_; }
  std::int64_t bytes_sent() const override { return 0; }
  Status exchange(std::string_view, std::span<const Out>, std::span<const In>,
                  std::span<std::int64_t>) override {
    return state_;
  }
  Status abandon(std::string_view reason) override {
    return state_ = Status(StatusCode::kDevice, std::string(reason));
  }
  Result<std::unique_ptr<Communicator>> subgroup(std::span<const int>, int) override {
    return std::unique_ptr<Communicator>(new BreakableGroup);
  }

 private:
  Status state_;
};

TEST(Communicator, ABrokenSharedSubgroupIsMadeAnew) {
  BreakableGroup world;
  const std::vector<int> me = {0};
  const auto first = world.shared_subgroup(me, 1).value();
  const auto other = world.shared_subgroup(me, 2).value();
  EXPECT_EQ(first->abandon("broken").code(), StatusCode::kDevice);
  const auto second = world.shared_subgroup(me, 1).value();
  EXPECT_NE(second, first);
  EXPECT_TRUE(second->state().ok());
  EXPECT_EQ(world.shared_subgroup(me, 1).value(), second);
  EXPECT_EQ(world.shared_subgroup(me, 2).value(), other);
}

// That the call ends is the test; a rank that comes later than the others' time-out hears of it.
TEST(Communicator, ALostRankIsReportedByAllOthers) {
  run_ranks(4, {.timeout_ms = 1000}, [](Communicator& c) {
    if (c.rank() == 2) return;  // gone
    const Status status = c.barrier("dispatch");
    expect_refusal(status, StatusCode::kDevice, {"dispatch", "1000 ms", "2"});
    // Broken: the first reason, at once.
    EXPECT_EQ(c.barrier("again").message(), status.message());
    EXPECT_EQ(c.state().message(), status.message());
  });
}

TEST(Communicator, ALateRankIsWaitedForWithinTheTime) {
  run_ranks(3, {.timeout_ms = test::kHangGuardMs}, [](Communicator& c) {
    if (c.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const Status status = c.barrier("slow");
    EXPECT_TRUE(status.ok()) << status.message();
  });
}

TEST(Communicator, AWrongCountIsReportedByEveryRank) {
  run_ranks(4, {.timeout_ms = test::kHangGuardMs}, [](Communicator& c) {
    const std::vector<std::byte> out(c.rank() == 3 ? 5 : 4);
    std::vector<std::byte> in(16);
    std::vector<In> recv;
    for (std::size_t r = 0; r < 4; ++r) recv.push_back(std::span(in).subspan(4 * r, 4));
    if (c.rank() == 3) recv[3] = {};
    std::vector<Out> send(4, out);
    if (c.rank() == 3) send[3] = {};
    static_cast<void>(c.exchange("combine", send, recv));
    // Rank 3 itself may have finished before the news came; it hears of it in the next call.
    expect_refusal(c.barrier("next"), StatusCode::kDevice, {"combine", "rank 3 sent 5 bytes"});
  });
}

TEST(Communicator, RanksInDifferentCallsNotice) {
  run_ranks(2, {.timeout_ms = test::kHangGuardMs}, [](Communicator& c) {
    const Status status = c.barrier(c.rank() == 0 ? "dispatch" : "combine");
    expect_refusal(status, StatusCode::kDevice, {"another call"});
  });
}

TEST(Communicator, ShorterMessagesAreMeasuredWhenAllowed) {
  run_ranks(3, {}, [](Communicator& c) {
    const std::vector<std::byte> out(static_cast<std::size_t>(c.rank()));
    std::vector<std::byte> in(12);
    std::vector<In> recv;
    for (std::size_t r = 0; r < 3; ++r) recv.push_back(std::span(in).subspan(4 * r, 4));
    std::vector<std::int64_t> received(3, -1);
    ASSERT_TRUE(c.exchange("rows", std::vector<Out>(3, out), recv, received).ok());
    EXPECT_EQ(received, (std::vector<std::int64_t>{0, 1, 2}));
  });
}

TEST(Communicator, SelfAndMisuse) {
  const auto self = std::move(make_in_process_communicators(1).value().front());
  EXPECT_EQ(self->name(), "self");
  EXPECT_EQ(self->size(), 1);
  std::vector<float> one = {3.0F};
  EXPECT_TRUE(self->all_reduce_sum("sum", one).ok());
  EXPECT_EQ(one[0], 3.0F);
  EXPECT_EQ(self->all_gather("one", 7).value(), (std::vector<std::int64_t>{7}));
  expect_refusal(self->exchange("bad", std::vector<Out>(2), std::vector<In>(1)),
                 StatusCode::kInvalidArgument, {"2 messages"});
  EXPECT_TRUE(self->state().ok());  // nothing was sent: not broken
  expect_refusal(make_in_process_communicators(0).status(), StatusCode::kInvalidArgument,
                 {"size: got 0"});
  EXPECT_EQ(nccl_available().ok(), nccl_available().message().empty());
  if (!launched_by_mpi()) {
    EXPECT_FALSE(mpi_available().message().empty());
  }
}

}  // namespace
}  // namespace moesaic
