// The shared experts' part apart, over two ranks: complete on each, asked for by all or none.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "layer/layer_case.h"
#include "layer/rank_case.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic::test {

// whole: options of one layer without ranks; of_rank(rank, experts, communicator): of one of two
// ranks that share the experts or their intermediate size; most(experts): the largest rel_l2.
template <class Make, class OfRank, class Most>
void expect_shared_part_over_ranks(const Make& make, const FusedMoE::Options& whole,
                                   const Tensor& x, OfRank of_rank, Most most) {
  FusedMoE::Args plain;
  plain.hidden_states = x.view();
  const Tensor want = must_run(make(whole).value(), plain).output;
  struct Case {
    bool experts, reduce;
    RankTransport transport;
  };
  for (const Case& c : {Case{false, true, RankTransport::kNone},
                        {false, false, RankTransport::kNone},
                        {true, true, RankTransport::kNone},
                        {true, true, RankTransport::kAllToAll}}) {
    for (const Status& s :
         on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&world) -> Status {
           FusedMoE::Options options = of_rank(rank, c.experts, world);
           options.ranks.reduce_results = c.reduce;
           options.ranks.transport = c.transport;
           MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, make(options));
           Tensor shared = Tensor::zeros(DType::kF32, x.shape()).value();
           poison(shared.view());
           FusedMoE::Args args = plain;
           args.shared_output = shared.view();
           Tensor y = must_run(layer, args).output;
           MOESAIC_RETURN_IF_ERROR(layer.maybe_all_reduce(y.view()));
           for (std::int64_t i = 0; i < y.bytes() / 4; ++i)
             y.as<float>()[i] += shared.as<float>()[i];
           const auto result = compare(to_doubles(y.view()), to_doubles(want.view()));
           EXPECT_LE(result.rel_l2, most(c.experts)) << result.describe;
           // One rank alone would wait for the other.
           if (rank == 1) args.shared_output = {};
           expect_refusal(run_args(layer, args).status(), StatusCode::kInvalidArgument,
                          {"shared_output: rank 1 gave none, rank 0 one"});
           return {};
         })) {
      EXPECT_TRUE(s.ok()) << s.to_string();
    }
  }
}

}  // namespace moesaic::test
