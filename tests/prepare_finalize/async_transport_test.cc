// prepare_async and finalize_async: the bits of prepare and finalize, with other work in between.
#include <gtest/gtest.h>

#include <thread>

#include "prepare_finalize/transport_case.h"
#include "support/hang_guard.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::kTransports;
using test::RankKernel;
using test::StandardCase;
using test::transport_name;

constexpr std::int64_t kRows = 5;  // of each rank in each call

struct TwoCalls {
  Tensor outputs[2];
  std::vector<Status> statuses[2];
};

// Each of three ranks has two calls under way at once: the rows of both leave before any expert
// runs, and the second is finished first. `spoil` changes the first call of rank 1.
TwoCalls run_two_calls(const StandardCase& first, const StandardCase& second,
                       test::TransportSetup setup,
                       const std::function<void(ModularKernel::Args&)>& spoil = {}) {
  constexpr int kRanks = 3;
  setup.calls_in_flight = 2;
  TwoCalls result;
  for (int i = 0; i < 2; ++i) {
    result.outputs[i] = Tensor::uninitialized(DType::kF32, first.hidden_states.shape()).value();
    test::poison(result.outputs[i].view());
    result.statuses[i].resize(kRanks);
  }
  auto comms = make_in_process_communicators(kRanks, {.timeout_ms = test::kHangGuardMs}).value();
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      const auto i = static_cast<std::size_t>(r);
      const std::shared_ptr<Communicator> comm = std::move(comms[i]);
      const auto rank = RankKernel::create(first, setup, comm).value();
      const ModularKernel& kernel = rank->kernel();
      EXPECT_TRUE(kernel.prepare_finalize().supports_async());
      rank->poison_workspace();
      ModularKernel::Args a = rank->args(first, r * kRows, kRows, result.outputs[0]);
      const ModularKernel::Args b = rank->args(second, r * kRows, kRows, result.outputs[1]);
      if (spoil && r == 1) spoil(a);
      Result<ModularKernel::Call> call_a = kernel.start(a);
      Result<ModularKernel::Call> call_b = kernel.start(b);
      Status of_a = call_a.ok() ? call_a->run_experts() : call_a.status();
      Status of_b = call_b.ok() ? call_b->run_experts() : call_b.status();
      if (of_b.ok()) of_b = call_b->finish();
      if (of_a.ok()) of_a = call_a->finish();
      result.statuses[0][i] = of_a;
      result.statuses[1][i] = of_b;
    });
  }
  for (std::thread& t : threads) t.join();
  return result;
}

TEST(AsyncTransport, TwoCallsUnderWayHaveTheBitsOfOneAfterTheOther) {
  for (const char* quant : {"bf16", "fp8-block"}) {
    const MoeProblem problem = test::small_problem(quant);
    const StandardCase first = test::make_case(81, problem, 3 * kRows, DType::kBF16, 0.1);
    StandardCase second = test::make_case(81, problem, 3 * kRows, DType::kBF16, 0.1);
    const StandardCase other = test::make_case(82, problem, 3 * kRows, DType::kBF16, 0.1);
    // Other rows and another routing through the same experts.
    std::copy_n(other.hidden_states.data(), other.hidden_states.bytes(),
                second.hidden_states.data());
    std::copy_n(other.routing.ids.data(), other.routing.ids.bytes(), second.routing.ids.data());
    for (const auto transport : kTransports) {
      SCOPED_TRACE(std::string(quant) + " " + transport_name(transport));
      const TwoCalls got = run_two_calls(first, second, {.transport = transport});
      const std::vector<std::int64_t> counts(3, kRows);
      const Tensor want[] = {
          run_transport(first, counts, {.transport = transport}).output,
          run_transport(second, counts, {.transport = transport}).output,
      };
      for (int i = 0; i < 2; ++i) {
        for (const Status& s : got.statuses[i]) EXPECT_TRUE(s.ok()) << s.to_string();
        std::string why;
        EXPECT_TRUE(test::same_bits(got.outputs[i].view(), want[i].view(), &why)) << why;
      }
    }
  }
}

// What is wrong with the one is no business of the other.
TEST(AsyncTransport, ARefusedCallLeavesTheOtherAlone) {
  const StandardCase c = test::make_case(83, test::small_problem("bf16"), 3 * kRows, DType::kBF16);
  Tensor bad_ids = Tensor::zeros(DType::kI32, {kRows, 2}).value();
  bad_ids.as<std::int32_t>()[3] = 99;
  for (const auto transport : kTransports) {
    SCOPED_TRACE(transport_name(transport));
    const TwoCalls got = run_two_calls(c, c, {.transport = transport}, [&](ModularKernel::Args& a) {
      a.topk_ids = bad_ids.view();
    });
    for (const Status& s : got.statuses[0]) {
      expect_refusal(s, StatusCode::kInvalidArgument, {"dispatch", "rank 1: ", "expert 99"});
    }
    for (const Status& s : got.statuses[1]) EXPECT_TRUE(s.ok()) << s.to_string();
    const Tensor want = run_transport(c, {kRows, kRows, kRows}, {.transport = transport}).output;
    std::string why;
    EXPECT_TRUE(test::same_bits(got.outputs[1].view(), want.view(), &why)) << why;
  }
}

// The forms that a PrepareAndFinalize without transport gets for nothing.
TEST(AsyncTransport, WithoutTransportTheFirstHalfDoesEverything) {
  const StandardCase c = test::make_case(84, test::small_problem("bf16"), 4, DType::kBF16);
  const auto pf = make_local_prepare_finalize(c.problem).value();
  EXPECT_FALSE(pf->supports_async());
  const auto experts = test::make_backend("cpu_reference", c);
  ASSERT_TRUE(pf->attach(*experts).ok());
  const PrepareArgs args{
      c.hidden_states.view(), c.routing.weights.view(), c.routing.ids.view(), c.expert_map, {}};
  const Prepared prepared = pf->prepare_async(args).value()->receive().value();
  EXPECT_EQ(prepared.hidden_states.data, c.hidden_states.data());
  Tensor rows = Tensor::zeros(DType::kF32, c.hidden_states.shape()).value();
  rows.as<float>()[3] = 5;
  Tensor output = Tensor::uninitialized(DType::kF32, rows.shape()).value();
  test::poison(output.view());
  FinalizeArgs f;
  f.output = output.view();
  f.expert_output = rows.view();
  f.topk_weights = c.routing.weights.view();
  f.topk_ids = c.routing.ids.view();
  f.expert_map = c.expert_map;
  ASSERT_TRUE(pf->finalize_async(f).value()->receive().ok());
  EXPECT_EQ(output.as<float>()[3], 5);
}

}  // namespace
}  // namespace moesaic
