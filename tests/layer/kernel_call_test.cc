// ModularKernel::start: a call in steps. Over ranks: tests/prepare_finalize/async_transport_test.cc.
#include <gtest/gtest.h>

#include <cfenv>
#include <optional>

#include "moesaic/modular_kernel.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

struct StepKernel {
  explicit StepKernel(ActivationFormat format, ModularKernel::Options options = {}) {
    MoeProblem p = test::small_problem("bf16");
    p.format = format;
    p.max_tokens = 6;
    c = test::make_case(71, p, 6, DType::kBF16);
    const auto source = make_stacked_source(c.weights.view());
    const bool standard = format == ActivationFormat::kStandard;
    options.max_tokens = 6;
    options.max_tokens_per_expert = standard ? 0 : 6;
    kernel.emplace(
        ModularKernel::create(
            c.problem,
            standard ? make_local_prepare_finalize(c.problem).value()
                     : make_batched_prepare_finalize(c.problem).value(),
            choose_experts(c.problem, "cpu_reference").value()->create(c.problem, *source).value(),
            options)
            .value());
  }
  ModularKernel::Args args(Tensor& output) const {
    return {
        c.hidden_states.view(), c.routing.weights.view(), c.routing.ids.view(), {}, output.view()};
  }
  Tensor poisoned() const {
    Tensor t = Tensor::uninitialized(DType::kF32, c.hidden_states.shape()).value();
    test::poison(t.view());
    return t;
  }
  test::StandardCase c;
  std::optional<ModularKernel> kernel;
};

TEST(KernelCall, InStepsEqualsRunInBothFormats) {
  for (const auto format : {ActivationFormat::kStandard, ActivationFormat::kBatched}) {
    const StepKernel k(format);
    Tensor want = k.poisoned(), got = k.poisoned();
    ASSERT_TRUE(k.kernel->run(k.args(want)).ok());
    const int mode = std::fegetround();
    ASSERT_EQ(std::fesetround(FE_UPWARD), 0);  // in whatever mode the calling thread is
    ModularKernel::Call call = k.kernel->start(k.args(got)).value();
    const Status computed = call.run_experts(), finished = call.finish();
    std::fesetround(mode);
    ASSERT_TRUE(computed.ok() && finished.ok());
    std::string why;
    EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
    expect_refusal(call.finish(), StatusCode::kInvalidArgument, {"finish", "second"});
    expect_refusal(call.run_experts(), StatusCode::kInvalidArgument, {"run_experts", "second"});
  }
}

TEST(KernelCall, FinishRunsTheExpertsWhereNobodyHas) {
  const StepKernel k(ActivationFormat::kStandard);
  Tensor want = k.poisoned(), got = k.poisoned();
  ASSERT_TRUE(k.kernel->run(k.args(want)).ok());
  ASSERT_TRUE(k.kernel->start(k.args(got)).value().finish().ok());
  std::string why;
  EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
}

TEST(KernelCall, AsManyAsThereAreWorkspaces) {
  StepKernel k(ActivationFormat::kStandard, {.calls_in_flight = 2});
  EXPECT_EQ(k.kernel->workspace_bytes(),
            2 * StepKernel(ActivationFormat::kStandard).kernel->workspace_bytes());
  Tensor a = k.poisoned(), b = k.poisoned(), c = k.poisoned();
  {
    const ModularKernel::Call first = k.kernel->start(k.args(a)).value();
    ASSERT_TRUE(k.kernel->run(k.args(b)).ok());  // in the other workspace
    const ModularKernel::Call second = k.kernel->start(k.args(b)).value();
    for (const Status& s : {k.kernel->start(k.args(c)).status(), k.kernel->run(k.args(c))}) {
      expect_refusal(s, StatusCode::kLimitExceeded, {"calls in flight", "more than 2"});
    }
  }
  EXPECT_TRUE(k.kernel->run(k.args(c)).ok());
  ModularKernel::Call over = k.kernel->start(k.args(a)).value();
  ASSERT_TRUE(over.finish().ok());
  {
    const ModularKernel::Call first = k.kernel->start(k.args(b)).value();
    const Result<ModularKernel::Call> second = k.kernel->start(k.args(c));
    EXPECT_TRUE(second.ok()) << "a finished call holds no workspace";
  }
  for (const int bad : {0, 17}) {
    const auto source = make_stacked_source(k.c.weights.view());
    const Status s = ModularKernel::create(
                         k.c.problem, make_local_prepare_finalize(k.c.problem).value(),
                         choose_experts(k.c.problem).value()->create(k.c.problem, *source).value(),
                         {.max_tokens = 6, .calls_in_flight = bad})
                         .status();
    expect_refusal(s, StatusCode::kInvalidArgument, {"calls_in_flight: got", "1 .. 16"});
  }
}

TEST(KernelCall, WrongArgumentsAreRefusedByStart) {
  const StepKernel k(ActivationFormat::kStandard);
  Tensor out = k.poisoned();
  ModularKernel::Args args = k.args(out);
  args.topk_ids.shape = Shape{6, 1};
  expect_refusal(k.kernel->start(args).status(), StatusCode::kInvalidShape, {"topk_ids"});
  EXPECT_TRUE(k.kernel->run(k.args(out)).ok()) << "the refused call keeps no workspace";
}

}  // namespace
}  // namespace moesaic
