// Experts with zeros behind their intermediate size compute what they compute without.
#include "experts/padded_source.h"

#include <gtest/gtest.h>

#include "experts/sm90/experts.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using experts::PaddedSource;
using test::StandardCase;

TEST(PaddedSource, ZerosChangeNoResult) {
  for (const char* quant : {"bf16", "f16", "f32"}) {
    for (const char* activation : {"silu", "swigluoai", "gelu", "relu2_no_mul"}) {
      SCOPED_TRACE(testing::Message() << quant << ' ' << activation);
      MoeProblem p = test::small_problem(quant);
      p.intermediate_size = 61;
      p.has_expert_bias = true;
      p.activation = make_activation(activation).value();
      const StandardCase c = test::make_case(3, p, 9, DType::kBF16);
      const Tensor want = run_standard(*test::make_backend("cpu_reference", c), c);
      const MoeProblem wide = experts::with_padded_width(c.problem, 8);
      EXPECT_EQ(wide.intermediate_size, 64);
      const auto source = make_stacked_source(c.weights.view());
      PaddedSource padded(c.problem, wide, *source);
      const auto made = choose_experts(wide, "cpu_reference").value()->create(wide, padded);
      ASSERT_TRUE(made.ok()) << made.status().to_string();
      const Tensor got = run_standard(**made, c);
      // The reference adds eight interleaved sums, which zeros at the end leave alone.
      std::string why;
      EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
    }
  }
}

// Blocks and their scales stay where they are.
TEST(PaddedSource, RaggedBlocksBecomeWhole) {
  for (const char* activation : {"silu", "relu2_no_mul"}) {
    MoeProblem p = test::small_problem("fp8-block");
    p.intermediate_size = 200;
    p.activation = make_activation(activation).value();
    const StandardCase c = test::make_case(5, p, 9, DType::kBF16);
    const Tensor want = run_standard(*test::make_backend("cpu_reference", c), c);
    const MoeProblem wide = experts::with_padded_width(c.problem, 128);
    EXPECT_EQ(wide.intermediate_size, 256);
    const auto source = make_stacked_source(c.weights.view());
    PaddedSource padded(c.problem, wide, *source);
    const auto made = choose_experts(wide, "cpu_reference").value()->create(wide, padded);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    std::string why;
    EXPECT_TRUE(test::same_bits(run_standard(**made, c).view(), want.view(), &why)) << why;
  }
}

TEST(PaddedSource, ChecksWhatItIsGiven) {
  MoeProblem p = test::small_problem("bf16");
  p.intermediate_size = 61;
  const StandardCase c = test::make_case(3, p, 2, DType::kBF16);
  const MoeProblem wide = experts::with_padded_width(p, 8);
  const auto source = make_stacked_source(c.weights.view());
  PaddedSource padded(wide, wide, *source);  // the source has other experts
  test::expect_refusal(padded.expert(0).status(), StatusCode::kInvalidShape, {"expert 0", "w13"});
}

TEST(PaddedSource, TheFastKernelTakesEveryIntermediateSize) {
  MoeProblem p;
  for (const char* quant : {"bf16", "fp8-block"}) {
    p = test::small_problem(quant);
    for (const std::int64_t width : {1, 7, 8, 61, 180}) {
      p.intermediate_size = width;
      EXPECT_TRUE(cuda::CudaExperts::can_implement(p).ok()) << quant << ' ' << width;
    }
  }
}

}  // namespace
}  // namespace moesaic
