// Operands that lie one behind the other, expert by expert, as tier amx reads them, on kernels of every
// machine: where they lie changes no bit.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/tiers.h"
#include "experts/cpu/experts.h"
#include "experts_on_tier.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::make_problem;
using test::OwnedExpertWeights;
using test::OwnedRouting;
using test::run_standard;

std::unique_ptr<Experts> make_on(const cpu::CpuKernels& kernels, const MoeProblem& p,
                                 const OwnedExpertWeights& w) {
  const auto source = make_stacked_source(w.view());
  auto made = experts::make_cpu_experts(kernels, p, *source);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  return std::move(made).value();
}

TEST(CpuExperts, RowsOneBehindTheOtherHaveTheBitsOfRowsThatAreNot) {
  for (const char* quant : {"bf16", "fp8-block", "int4-g128", "gptq", "fp8-channel", "fp8-static",
                            "nvfp4", "int8", "f32", "q6k-super"}) {
    // Rows of 2048 and 256 bytes of bf16: behind the first a line is left free.
    for (const auto& [hidden, inner] : {std::pair{1024, 512}, std::pair{96, 128}}) {
      if (hidden == 96 && std::string(quant) != "bf16") continue;  // groups of 128
      MoeProblem p = make_problem(quant, hidden, inner, 3, 2);
      const OwnedExpertWeights w = test::random_expert_weights(91, p);
      for (const std::int64_t tokens : {1, 13, 330}) {  // of 1 and 13: by token and by slot
        test::Rng rng(92);
        const Tensor x = test::random_normal(rng, p.activation_dtype, {tokens, hidden});
        const OwnedRouting routing = test::random_routing(93, tokens, 3, 2);
        for (const std::string& tier : test::tiers()) {
          const cpu::CpuKernels* usual = cpu::kernels_by_name(tier).value();
          cpu::CpuKernels kernels = *usual;
          kernels.reads_spaced_rows = false;
          kernels.rows_per_call = 32;
          const auto plain = make_on(kernels, p, w);
          cpu::CpuKernels tiles = kernels;
          tiles.reads_spaced_rows = true;
          tiles.rows_per_call = cpu::kMaxRows;
          const auto spaced = make_on(tiles, p, w);
          std::vector<RowNumerics> want_numerics(static_cast<std::size_t>(tokens));
          std::vector<RowNumerics> numerics(want_numerics);
          const Tensor want =
              run_standard(*plain, p, x.view(), routing, DType::kF32, {}, want_numerics);
          const Tensor got = run_standard(*spaced, p, x.view(), routing, DType::kF32, {}, numerics);
          std::string why;
          EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why))
              << tier << ' ' << quant << " H " << hidden << " tokens " << tokens << ' ' << why;
          const Tensor unmeasured = run_standard(*spaced, p, x.view(), routing, DType::kF32);
          EXPECT_TRUE(test::same_bits(unmeasured.view(), want.view(), &why))
              << tier << ' ' << quant;
          for (std::size_t t = 0; t < numerics.size(); ++t) {
            ASSERT_EQ(numerics[t].size, want_numerics[t].size) << tier << ' ' << quant << ' ' << t;
            ASSERT_EQ(numerics[t].noise, want_numerics[t].noise)
                << tier << ' ' << quant << ' ' << t;
            ASSERT_EQ(numerics[t].flags, want_numerics[t].flags)
                << tier << ' ' << quant << ' ' << t;
          }
          // A line a row of GEMM2's operands and what lies beside rows, but not the rows again.
          EXPECT_LE(spaced->workspace_size(tokens).value(),
                    plain->workspace_size(tokens).value() + tokens * 2 * (64 + 128))
              << tier << ' ' << quant;
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesaic
