// Kernels of the transport through peer windows: virtual ranks whose windows lie on one GPU, run one
// after the other on one stream, so that no kernel waits for a later one. Expected values are
// computed on the host and equal by bits. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "prepare_finalize/peer_world.h"
#include "prepare_finalize/sm90/peer_report.h"
#include "support/cuda_device.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using parallel::PeerAnswerForm;
using parallel::PeerKind;
using test::PeerShapeCase;
using test::PeerWorld;
using test::VirtualRank;

// Read when CUDA starts: a kernel that is loaded at its launch would wait for one that waits. What the
// environment has stays: under a sanitizer, which instruments what is loaded, LAZY is quicker by far.
const bool kEagerLoading = setenv("CUDA_MODULE_LOADING", "EAGER", 0) == 0 &&
                           std::string(getenv("CUDA_MODULE_LOADING")) == "EAGER";

std::vector<PeerShapeCase> shape_cases(std::initializer_list<int> counts) {
  std::vector<PeerShapeCase> all;
  for (const int ranks : counts) {
    for (const std::int32_t groups : {0, 3}) {
      PeerShapeCase c = PeerShapeCase{ranks}.with_groups(groups);
      all.push_back(c);
      c.bf16 = true;
      all.push_back(c);
      c.gather = true;
      all.push_back(c);
      c.from_slots = true;
      c.top_k = 6;
      all.push_back(c);
      c.gather = false;
      all.push_back(c);
      c.bf16 = false;
      if (groups == 0) {
        c.hidden = 264;  // not the same for all lanes
        all.push_back(c);
        c.hidden = 32;
      } else if (ranks <= 3) {
        all.push_back(c.with_groups(17));  // a second pass, which only some threads have
        all.push_back(c.with_groups(65));
      }
      c.bf16 = true;
      c.from_slots = false;
      c.top_k = 3;
      c.form = PeerAnswerForm::kSlot;
      all.push_back(c);
      c.bf16 = false;
      all.push_back(c);
    }
  }
  return all;
}

// Four calls in which the ranks' rows change; the epoch wraps in the second.
void expect_bits_of_the_host(std::initializer_list<int> ranks) {
  for (const PeerShapeCase& c : shape_cases(ranks)) {
    PeerWorld world(c, 0xFFFFFFFEU);
    test::Rng rng(9);
    for (std::uint64_t call = 1; call <= 4; ++call) {
      std::vector<std::int64_t> live;
      for (int r = 0; r < c.ranks; ++r) {
        const std::int64_t any =
            static_cast<std::int64_t>(rng.next() % static_cast<std::uint64_t>(c.tokens + 1));
        live.push_back(call == 1 ? c.tokens : (r + static_cast<int>(call)) % 3 == 0 ? 0 : any);
      }
      const std::string wrong = world.call(call, live);
      ASSERT_EQ(wrong, "") << c.name() << ", call " << call;
    }
  }
}

TEST(CudaPeerRows, EveryFormHasTheBitsOfTheHost) {
  REQUIRE_HOPPER();
  expect_bits_of_the_host({2, 3});
}
TEST(CudaPeerRows, ManyRanksHaveTheBitsOfTheHost) {
  REQUIRE_HOPPER();
  expect_bits_of_the_host({8, 32});
}

// Rank 0 waits until the last rank has sent, however long that takes.
TEST(CudaPeerRows, AWaitEndsWithTheLastWord) {
  REQUIRE_HOPPER();
  if (!kEagerLoading) GTEST_SKIP() << "CUDA_MODULE_LOADING is not EAGER";
  PeerShapeCase c;
  c.ranks = 3;
  PeerWorld world(c, 4);
  for (int r = 0; r < 3; ++r) world.fill(r, 5, 4);
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  world.send(0);
  world.wait(0, PeerKind::kRows);
  world.take(0);
  world.send(2, other);
  ASSERT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(world.stream()), cudaErrorNotReady);
  world.send(1, other);
  world.synchronize();
  EXPECT_EQ(world.check_arrived(0), "");
  ASSERT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  (void)cudaStreamDestroy(other);
}

// Two of four ranks do not send: both are named, also to the rank that waits after the report; what
// follows returns at once, with NaN.
TEST(CudaPeerRows, AReportNamesAllWhoAreLateToAll) {
  REQUIRE_HOPPER();
  PeerShapeCase c;
  c.ranks = 4;
  PeerWorld world(c, 0, 20'000'000);
  for (int r = 0; r < 4; ++r) world.fill(r, 6, 3);
  world.send(0);
  world.send(3);
  for (const int r : {0, 3}) {
    world.wait(r, PeerKind::kRows);
    world.take(r);
    world.answer(r);
    world.wait(r, PeerKind::kAnswers);
    world.sum(r);
  }
  world.synchronize();
  for (const int r : {0, 3}) {
    const VirtualRank& v = world.rank(r);
    const Status status = cuda::peer_report_status(v.report, "test", 20);
    test::expect_refusal(status, StatusCode::kDevice,
                         {"dispatch (test), call 1", "within 20 ms", "rank(s) 1 2,", "rank 0"});
    for (const std::int32_t id : v.arrived_ids->values<std::int32_t>()) EXPECT_EQ(id, -1);
    const auto sums = v.sum->values<float>();
    for (std::int64_t i = 0; i < 3 * c.hidden; ++i) {
      EXPECT_TRUE(std::isnan(sums[static_cast<std::size_t>(i)])) << i;
    }
  }
  // One that comes too late hears that it was missed, and does not wait.
  world.send(1);
  world.wait(1, PeerKind::kRows);
  world.synchronize();
  test::expect_refusal(cuda::peer_report_status(world.rank(1).report, "test", 20),
                       StatusCode::kDevice, {"rank(s) 1 2,", "says rank 0"});
}

TEST(CudaPeerRows, AnotherCallAndARefusalAreNamed) {
  REQUIRE_HOPPER();
  PeerShapeCase c;
  c.ranks = 3;
  {
    PeerWorld world(c, 0);
    for (int r = 0; r < 3; ++r) world.fill(r, 7, 2);
    world.rank(1).place.signature = 78;
    for (int r = 0; r < 3; ++r) world.send(r);
    world.wait(2, PeerKind::kRows);
    world.wait(0, PeerKind::kRows);
    world.synchronize();
    for (const int r : {0, 2}) {
      test::expect_refusal(cuda::peer_report_status(world.rank(r).report, "test", 20),
                           StatusCode::kDevice, {"rank(s) 1 in another call"});
    }
  }
  PeerWorld world(c, 0);
  for (int r = 0; r < 3; ++r) world.fill(r, 7, 2);
  world.send(0);
  world.send(1);
  EXPECT_EQ(cuda::launch_peer_refuse(world.rank(2).place, world.stream()), 0);
  world.wait(0, PeerKind::kRows);
  world.synchronize();
  test::expect_refusal(cuda::peer_report_status(world.rank(0).report, "test", 20),
                       StatusCode::kDevice, {"rank 2 did not take part"});
  test::expect_refusal(cuda::peer_report_status(world.rank(2).report, "test", 20),
                       StatusCode::kDevice, {"rank 2 did not take part"});
}

// What follows on rank 0 once its rows are sent: NaN, whatever words lie in its window.
void expect_rank_0_ends_with_nan(PeerWorld& world, const PeerShapeCase& c) {
  world.wait(0, PeerKind::kRows);
  world.take(0);
  world.answer(0);
  world.wait(0, PeerKind::kAnswers);
  world.sum(0);
  world.synchronize();
  const VirtualRank& v = world.rank(0);
  const auto sums = v.sum->values<float>();
  for (std::int64_t i = 0; i < v.live * c.hidden; ++i) {
    ASSERT_TRUE(std::isnan(sums[static_cast<std::size_t>(i)])) << c.name() << " " << i;
  }
}

// A graph that is replayed after its rank has refused a call finds the words of the call before.
TEST(CudaPeerRows, AfterARefusalTheAnswersBeforeAreNotSummedAgain) {
  REQUIRE_HOPPER();
  for (const int ranks : {2, 3}) {
    PeerShapeCase c;
    c.ranks = ranks;
    PeerWorld world(c, 0, 20'000'000);
    ASSERT_EQ(world.call(1, std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 3)), "");
    EXPECT_EQ(cuda::launch_peer_refuse(world.rank(0).place, world.stream()), 0);
    world.send(0);
    expect_rank_0_ends_with_nan(world, c);
  }
}

// And after its rank has waited in vain, the answers that came too late.
TEST(CudaPeerRows, AfterATimeOutLateAnswersAreNotSummed) {
  REQUIRE_HOPPER();
  for (const int ranks : {2, 3}) {
    PeerShapeCase c;
    c.ranks = ranks;
    PeerWorld world(c, 0, 20'000'000);
    for (int r = 0; r < ranks; ++r) {
      world.fill(r, 8, 3);
      world.make_results(r, 8);
      world.send(r);
    }
    for (int r = 1; r < ranks; ++r) {
      world.wait(r, PeerKind::kRows);
      world.take(r);
    }
    expect_rank_0_ends_with_nan(world, c);
    for (int r = 1; r < ranks; ++r) world.answer(r);
    world.send(0);
    expect_rank_0_ends_with_nan(world, c);
  }
}

}  // namespace
}  // namespace moesaic
