// Rounded router logits over ranks (threads).
#include <gtest/gtest.h>

#include "layer/near_ties.h"
#include "layer/rank_case.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::RankCombo;
using test::RankProblem;

RankProblem rounded_problem(const test::LayerTensors& tensors) {
  RankProblem p;
  p.make = test::maker_of(tensors);
  p.options.quant = "f32";
  p.options.max_tokens = 5;
  p.options.num_threads = 1;
  p.options.router_logits_dtype = DType::kBF16;
  p.options.gate_force_fp32_compute = false;
  p.x = test::random_hidden(77, 19, tensors.spec.hidden_size);
  test::solve_on_one_rank(p);
  return p;
}

// Near ties are decided alike: a rank that kept fp32 logits would choose other experts.
TEST(RankedLogits, RoundedLogitsOverRanksEqualOneRank) {
  const test::LayerTensors tensors = test::near_ties(DType::kBF16);
  RankProblem problem = rounded_problem(tensors);
  for (const RankCombo& combo : test::rank_combos(2)) {
    const auto tokens = test::uneven_tokens(5, 19, combo.dp * combo.pcp);
    EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << combo.name();
  }
  problem.options.router_logits_dtype = DType::kF32;
  problem.options.gate_force_fp32_compute = true;
  EXPECT_NE(test::run_ranks(problem, {.dp = 2, .ep = true}, {8, 11}), "") << "nothing was rounded";
}

TEST(RankedLogits, RanksThatRoundDifferentlyAreRefused) {
  const test::LayerTensors tensors = test::near_ties(DType::kBF16);
  const auto make = test::maker_of(tensors);
  for (const Status& s : test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) {
         FusedMoE::Options o;
         o.max_tokens = 8;
         o.num_threads = 1;
         o.ranks.communicator = c;
         o.parallel.ep_size = o.parallel.dp_size = 2;
         o.parallel.ep_rank = o.parallel.dp_rank = rank;
         if (rank == 1) o.router_logits_dtype = DType::kBF16;
         return make(o).status();
       })) {
    test::expect_refusal(s, StatusCode::kInvalidArgument, {"layer", "other options"});
  }
}

}  // namespace
}  // namespace moesaic
