// Ranks on GPUs of one machine: skipped, with the reason, where there are fewer than two or no
// NCCL.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "moesaic/communicator.h"
#include "moesaic/device.h"
#include "parallel/helper_thread.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using Out = std::span<const std::byte>;
using In = std::span<std::byte>;

std::vector<int> usable_devices() {
  std::vector<int> devices;
  for (const CudaDeviceInfo& d : query_cuda().devices) {
    if (d.available) devices.push_back(d.index);
  }
  return devices;
}

// One thread and one device per rank; all devices there are.
void run_ranks(int timeout_ms, const std::function<void(Communicator&, int device)>& body) {
  const std::vector<int> devices = usable_devices();
  auto controls =
      make_in_process_communicators(static_cast<int>(devices.size()), {.timeout_ms = timeout_ms})
          .value();
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < devices.size(); ++r) {
    threads.emplace_back(
        [&, device = devices[r], control = std::shared_ptr<Communicator>(std::move(controls[r]))] {
          // Connecting may take seconds; what is tested has its own time.
          auto nccl = make_nccl_communicator(control, device, {.timeout_ms = timeout_ms});
          ASSERT_TRUE(nccl.ok()) << nccl.status().message();
          body(**nccl, device);
        });
  }
  for (std::thread& t : threads) t.join();
}

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    const Status available = nccl_available();
    if (!available.ok()) GTEST_SKIP() << "no NCCL: " << available.message();
    if (usable_devices().size() < 2) GTEST_SKIP() << "one GPU only";
  }
};

std::byte pattern(std::size_t from, std::size_t to, std::size_t i) {
  return static_cast<std::byte>(31 * from + 7 * to + i);
}

TEST_F(Nccl, HostMessagesArriveWithTheirSizes) {
  run_ranks(60'000, [](Communicator& c, int) {
    EXPECT_EQ(c.name(), "nccl");
    const auto n = static_cast<std::size_t>(c.size());
    const auto me = static_cast<std::size_t>(c.rank());
    for (const std::size_t unit :
         {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{1} << 20}) {
      std::vector<std::vector<std::byte>> out(n), in(n);
      std::vector<Out> send;
      std::vector<In> recv;
      for (std::size_t r = 0; r < n; ++r) {
        for (std::size_t i = 0; i < unit * (me + 1); ++i) out[r].push_back(pattern(me, r, i));
        in[r].assign(unit * n + 3, std::byte{0xFF});
        send.emplace_back(out[r]);
        recv.emplace_back(in[r]);
      }
      std::vector<std::int64_t> received(n, -1);
      const Status status = c.exchange("host", send, recv, received);
      ASSERT_TRUE(status.ok()) << status.message();
      for (std::size_t r = 0; r < n; ++r) {
        ASSERT_EQ(received[r], static_cast<std::int64_t>(unit * (r + 1)));
        for (std::size_t i = 0; i < unit * (r + 1); ++i) {
          ASSERT_EQ(in[r][i], pattern(r, me, i)) << "byte " << i << " from rank " << r;
        }
        EXPECT_EQ(in[r][unit * (r + 1)], std::byte{0xFF}) << "written behind the message";
      }
    }
    std::vector<float> sum = {static_cast<float>(me + 1)};
    ASSERT_TRUE(c.all_reduce_sum("sum", sum).ok());
    EXPECT_EQ(sum[0], static_cast<float>(n * (n + 1) / 2));
    const std::vector<int> pair = {c.rank() / 2 * 2, c.rank() / 2 * 2 + 1};
    if (pair[1] < c.size()) {
      const auto group = c.subgroup(pair, 1).value();
      EXPECT_EQ(group->all_gather("pair", c.rank()).value(),
                (std::vector<std::int64_t>{pair[0], pair[1]}));
    }
  });
}

TEST_F(Nccl, DeviceMessagesAreNotStaged) {
  run_ranks(60'000, [](Communicator& c, int device) {
    ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
    const auto n = static_cast<std::size_t>(c.size());
    const auto me = static_cast<std::size_t>(c.rank());
    constexpr std::size_t kBytes = 1 << 22;
    std::byte* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, 2 * n * kBytes), cudaSuccess);
    std::vector<std::byte> host(n * kBytes);
    for (std::size_t i = 0; i < host.size(); ++i) host[i] = pattern(me, i / kBytes, i % kBytes);
    ASSERT_EQ(cudaMemcpy(memory, host.data(), host.size(), cudaMemcpyHostToDevice), cudaSuccess);
    ASSERT_EQ(cudaMemset(memory + n * kBytes, 0xFF, n * kBytes), cudaSuccess);
    std::vector<Out> send;
    std::vector<In> recv;
    for (std::size_t r = 0; r < n; ++r) {
      send.emplace_back(memory + r * kBytes, kBytes);
      recv.emplace_back(memory + (n + r) * kBytes, kBytes);
    }
    const Status status = c.exchange("device", send, recv);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(cudaMemcpy(host.data(), memory + n * kBytes, host.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    for (std::size_t i = 0; i < host.size(); ++i) {
      ASSERT_EQ(host[i], pattern(i / kBytes, me, i % kBytes)) << i;
    }
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
  });
}

TEST_F(Nccl, AWrongCountIsEverybodysAnswerAndNothingIsLaunched) {
  run_ranks(60'000, [](Communicator& c, int) {
    const auto n = static_cast<std::size_t>(c.size());
    const std::vector<std::byte> out(c.rank() == 1 ? 5 : 4);
    std::vector<std::byte> in(4 * n);
    std::vector<In> recv;
    for (std::size_t r = 0; r < n; ++r) recv.push_back(std::span(in).subspan(4 * r, 4));
    const Status status = c.exchange("combine", std::vector<Out>(n, out), recv);
    test::expect_refusal(status, StatusCode::kDevice, {"combine", "rank 1 sent 5 bytes, need 4"});
    EXPECT_EQ(c.barrier("next").message(), status.message());
  });
}

TEST_F(Nccl, ALostRankIsReported) {
  run_ranks(5000, [](Communicator& c, int) {
    ASSERT_TRUE(c.barrier("start").ok());
    if (c.rank() == 1) return;
    test::expect_refusal(c.barrier("dispatch"), StatusCode::kDevice, {"dispatch", "1"});
  });
}

// Calls that may never return are made so; this needs neither a GPU nor NCCL.
TEST(HelperThread, IsLeftBehindAtTheDeadline) {
  using parallel::HelperThread;
  using std::chrono::milliseconds;
  const auto now = [] { return HelperThread::Clock::now(); };
  {
    HelperThread thread;
    auto value = std::make_shared<int>(0);
    ASSERT_TRUE(thread.start(0, [value] { *value = 7; }).ok());
    EXPECT_TRUE(thread.done_by(now() + std::chrono::seconds(60)));
    EXPECT_EQ(*value, 7);
    EXPECT_EQ(value.use_count(), 1) << "the thread lets go before it says that it is done";
  }
  // What the thread and the test share, until the thread is through.
  struct Gate {
    std::atomic<bool> open = false, through = false;
  };
  const auto gate = std::make_shared<Gate>();
  {
    HelperThread thread;
    const auto wait = [gate] {
      while (!gate->open) std::this_thread::sleep_for(milliseconds(1));
      gate->through = true;
    };
    ASSERT_TRUE(thread.start(0, wait).ok());
    EXPECT_FALSE(thread.done_by(now() + milliseconds(20)));
  }
  EXPECT_FALSE(gate->through);
  gate->open = true;
  const auto end = now() + std::chrono::seconds(60);
  while (!gate->through && now() < end) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(gate->through);
}

TEST(NcclMisuse, RefusesByName) {
  test::expect_refusal(make_nccl_communicator(nullptr, 0).status(), StatusCode::kInvalidArgument,
                       {"control"});
  if (nccl_available().ok()) GTEST_SKIP() << "NCCL is there";
  const Status status =
      make_nccl_communicator(std::move(make_in_process_communicators(1).value().front()), 0)
          .status();
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(status.message().empty());
}

}  // namespace
}  // namespace moesaic
