// Shared experts in slices, one for each rank with the same rows (RankOptions::cut_shared).
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "layer/rank_case.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/refusal.h"
#include "support/source_folder.h"

namespace moesaic {
namespace {

using test::compare;
using test::expect_refusal;
using test::RankCombo;
using test::to_doubles;

// Where parts are added up: rows that are everywhere, or gathered slices of experts.
bool adds_parts(const RankCombo& c) {
  const bool rows_differ = c.dp * c.pcp > 1 || c.sp;
  const RankTransport transport = c.transport != RankTransport::kAuto ? c.transport
                                  : !rows_differ                      ? RankTransport::kNone
                                  : c.ep                              ? RankTransport::kAllToAll
                                                                      : RankTransport::kGather;
  return c.reduction == RankReduction::kPerRank && c.tp > 1 && !c.sp &&
         (transport == RankTransport::kNone || transport == RankTransport::kGather);
}

TEST(CutShared, EveryCombinationThatAddsPartsHasTheResultOfOneRank) {
  int ran = 0, refused = 0;
  for (const test::Feature& f : test::rank_specs()) {
    const test::LayerTensors tensors = test::make_tensors(61, f.spec());
    if (tensors.spec.shared.intermediate_size == 0) continue;
    for (const bool reduce : {true, false}) {
      test::RankProblem problem;
      problem.make = test::maker_of(tensors);
      problem.options.max_tokens = 5;
      problem.options.num_threads = 1;
      problem.options.ranks.cut_shared = true;
      problem.options.ranks.reduce_results = reduce;
      problem.x = test::random_hidden(62, 11, tensors.spec.hidden_size);
      test::solve_on_one_rank(problem);
      for (const int ranks : {2, 4}) {
        for (const RankCombo& combo : test::rank_combos(ranks)) {
          const auto tokens = test::uneven_tokens(6, 11, combo.dp * combo.pcp);
          const std::string wrong = test::run_ranks(problem, combo, tokens);
          if (combo.tp == 1 || combo.sp || adds_parts(combo)) {  // one rank with the rows: whole
            EXPECT_EQ(wrong, "") << f.name << " " << combo.name();
            ran += adds_parts(combo) ? 1 : 0;
          } else {
            EXPECT_NE(wrong.find("cut_shared: got true with"), std::string::npos)
                << f.name << " " << combo.name() << ": " << wrong;
            ++refused;
          }
        }
      }
    }
  }
  EXPECT_GT(ran, 20);
  EXPECT_GT(refused, 20);
}

FusedMoE::Options slices(int rank, bool experts, const std::shared_ptr<Communicator>& c) {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.max_tokens = 4;
  o.ranks.communicator = c;
  o.ranks.cut_shared = true;
  (experts ? o.parallel.ep_size : o.parallel.tp_size) = 2;
  (experts ? o.parallel.ep_rank : o.parallel.tp_rank) = rank;
  return o;
}

// A part that is wanted apart is complete on every rank; with the routed one it is the sum.
TEST(CutShared, ThePartApartIsComplete) {
  for (const bool gated : {false, true}) {
    const test::LayerTensors tensors = test::make_tensors(63, test::with_shared(gated));
    const auto make = test::maker_of(tensors);
    const Tensor x = test::random_hidden(64, 7, 64);
    FusedMoE::Args args;
    args.hidden_states = x.view();
    Tensor want_part = Tensor::zeros(DType::kF32, x.shape()).value();
    args.shared_output = want_part.view();
    const Tensor want = test::must_run(make({}).value(), args).output;
    for (const bool experts : {false, true}) {
      std::vector<Tensor> parts(2);
      for (const Status& s :
           test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
             const auto i = static_cast<std::size_t>(rank);
             MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, make(slices(rank, experts, c)));
             MOESAIC_ASSIGN_OR_RETURN(parts[i], Tensor::zeros(DType::kF32, x.shape()));
             FusedMoE::Args call = args;
             call.shared_output = parts[i].view();
             const Tensor routed = test::must_run(layer, call).output;
             EXPECT_LE(compare(to_doubles(routed.view()), to_doubles(want.view())).rel_l2, 1e-6);
             return {};
           })) {
        EXPECT_TRUE(s.ok()) << s.to_string();
      }
      test::expect_same(parts[0], parts[1], "ranks");
      EXPECT_LE(compare(to_doubles(parts[0].view()), to_doubles(want_part.view())).rel_l2, 1e-6);
    }
  }
}

// The files are read in slices; so is what the caller adds up without a communicator. Stored blocks
// stay whole, or the cut is refused.
TEST(CutShared, OfACheckpoint) {
  const std::string folder = test::bundled_model("mini-deepseek-v3");
  const Checkpoint checkpoint = Checkpoint::open(folder).value();
  const MoeLayerSpec spec = checkpoint.layers().front();
  ASSERT_GT(spec.shared.intermediate_size, 0);
  test::RankProblem problem = test::checkpoint_problem(checkpoint, folder, "f32", 9);
  problem.options.ranks.cut_shared = true;
  RankCombo combo;
  combo.tp = 2;
  combo.ep = true;
  combo.transport = RankTransport::kNone;
  const ParallelConfig two = [] {
    ParallelConfig p;
    p.ep_size = 2;
    return p;
  }();
  const Result<MoeLayerFormat> format = checkpoint.check_layer(spec.layer, two, true, true);
  if (!format.ok()) {
    expect_refusal(format.status(), StatusCode::kInvalidArgument,
                   {"shared.intermediate_size", "weight block"});
    GTEST_SKIP() << "the bundled checkpoint's shared expert cannot be cut in two";
  }
  EXPECT_EQ(test::run_ranks(problem, combo, {9}), "");

  std::vector<double> sum(static_cast<std::size_t>(9 * spec.hidden_size), 0.0);
  for (int rank = 0; rank < 2; ++rank) {
    FusedMoE::Options options = problem.options;
    options.parallel = two;
    options.parallel.ep_rank = rank;
    const FusedMoE layer = FusedMoE::from_checkpoint(checkpoint, spec.layer, options).value();
    EXPECT_FALSE(layer.output_is_reduced());
    const std::vector<double> part = to_doubles(test::run_layer(layer, problem.x).output.view());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
  }
  EXPECT_LE(compare(sum, to_doubles(problem.want.view())).rel_l2, 1e-6);
}

TEST(CutShared, WhatCannotBeCutIsRefused) {
  const MoeLayerSpec spec = test::with_shared(true);
  FusedMoE::Options options;
  options.ranks.cut_shared = true;
  EXPECT_TRUE(explain_layer(spec, options).ok());  // one rank: nothing is cut
  options.parallel.tp_size = 32;                   // 48 columns
  expect_refusal(explain_layer(spec, options).status(), StatusCode::kInvalidArgument,
                 {"shared.intermediate_size: got 48"});
  ParallelSizes sizes;
  sizes.tp_size = sizes.dp_size = 2;
  sizes.enable_expert_parallel = true;
  options.parallel = ParallelConfig::from_sizes(sizes).value();
  expect_refusal(explain_layer(spec, options).status(), StatusCode::kUnsupported,
                 {"cut_shared", "without a communicator", "2 have the same rows"});
  options.parallel = {};
  options.ranks.enable_eplb = true;
  expect_refusal(explain_layer(spec, options).status(), StatusCode::kUnsupported,
                 {"cut_shared", "enable_eplb"});
  options.ranks.enable_eplb = false;
  options.include_shared = false;
  options.shared_experts = [](ConstTensorView, TensorView) { return Status(); };
  expect_refusal(explain_layer(spec, options).status(), StatusCode::kUnsupported,
                 {"cut_shared", "function"});
}

}  // namespace
}  // namespace moesaic
