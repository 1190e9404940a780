// Rounded router logits over ranks that share one GPU. Skipped, visibly, without a device.
#include <gtest/gtest.h>

#include "layer/cuda_rank_case.h"
#include "layer/near_ties.h"
#include "support/cuda_device.h"

namespace moesaic {
namespace {

using test::RankCombo;
using test::RankProblem;

TEST(CudaRanksLogits, RoundedLogitsOverRanksEqualOneRank) {
  REQUIRE_HOPPER();
  const test::LayerTensors tensors = test::near_ties(DType::kBF16);
  RankProblem problem = test::gpu_problem(tensors, 19);
  problem.options.router_logits_dtype = DType::kBF16;
  test::solve_on_one_rank(problem);
  for (const RankCombo& combo : test::rank_combos(2)) {
    if (!test::runs_on_gpus(combo, tensors.spec)) continue;
    problem.bound = test::bound_on_gpus(combo);
    const auto tokens = test::uneven_tokens(5, 19, combo.dp * combo.pcp);
    EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << combo.name();
  }
}

}  // namespace
}  // namespace moesaic
