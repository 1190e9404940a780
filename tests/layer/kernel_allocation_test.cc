// ModularKernel::run allocates nothing: every operator new of this binary is counted.
#include <gtest/gtest.h>

#include "moesaic/modular_kernel.h"
#include "support/count_allocations.h"
#include "support/experts_run.h"

namespace moesaic {
namespace {

TEST(ModularKernelAllocation, RunAllocatesNothingInEitherFormat) {
  for (const auto format : {ActivationFormat::kStandard, ActivationFormat::kBatched}) {
    MoeProblem p = test::small_problem("bf16");
    p.format = format;
    p.max_tokens = 6;
    const test::StandardCase c = test::make_case(1, p, 6, DType::kBF16);
    const auto source = make_stacked_source(c.weights.view());
    auto experts = choose_experts(c.problem, "cpu_reference").value()->create(c.problem, *source);
    const bool standard = format == ActivationFormat::kStandard;
    auto pf = standard ? make_local_prepare_finalize(c.problem)
                       : make_batched_prepare_finalize(c.problem);
    ModularKernel::Options options;
    options.max_tokens = 6;
    options.max_tokens_per_expert = standard ? 0 : 6;
    const ModularKernel kernel =
        ModularKernel::create(c.problem, std::move(pf).value(), std::move(experts).value(), options)
            .value();
    Tensor output = Tensor::zeros(DType::kF32, {6, p.hidden_size}).value();
    const ModularKernel::Args args{
        c.hidden_states.view(), c.routing.weights.view(), c.routing.ids.view(), {}, output.view()};
    ASSERT_TRUE(kernel.run(args).ok());
    const long before = test::allocations();
    const Status status = kernel.run(args);
    EXPECT_EQ(test::allocations(), before);
    EXPECT_TRUE(status.ok());
  }
}

}  // namespace
}  // namespace moesaic
