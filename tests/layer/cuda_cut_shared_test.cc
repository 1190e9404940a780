// Shared experts in slices on GPUs (RankOptions::cut_shared), ranks as threads on the first one.
// Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layer/cuda_rank_case.h"
#include "support/cuda_device.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::compare;
using test::RankCombo;
using test::to_doubles;

TEST(CudaCutShared, HasTheResultOfOneRank) {
  REQUIRE_HOPPER();
  for (const bool gated : {false, true}) {
    const test::LayerTensors tensors = test::make_tensors(65, test::with_shared(gated));
    for (const bool reduce : {true, false}) {
      test::RankProblem problem = test::gpu_problem(tensors, 11);
      problem.options.ranks.cut_shared = true;
      problem.options.ranks.reduce_results = reduce;
      for (const bool experts : {false, true}) {
        for (const int dp : {1, 2}) {
          RankCombo combo;
          combo.tp = 2;
          combo.dp = dp;
          combo.ep = experts;
          combo.transport = dp == 1 ? RankTransport::kNone : RankTransport::kGather;
          problem.bound = 6e-3;  // slices are rounded to bf16
          EXPECT_EQ(test::run_ranks(problem, combo, test::uneven_tokens(7, 11, dp)), "")
              << combo.name() << (gated ? " gated" : "") << (reduce ? "" : " left to the caller");
        }
      }
    }
  }
}

TEST(CudaCutShared, ThePartApartIsComplete) {
  REQUIRE_HOPPER();
  const test::LayerTensors tensors = test::make_tensors(66, test::with_shared(true));
  const auto make = test::maker_of(tensors);
  const Tensor x = test::random_hidden(67, 6, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  Tensor want = Tensor::zeros(DType::kF32, x.shape()).value();
  args.shared_output = want.view();
  test::must_run(make(test::on_gpu(8)).value(), args);
  std::vector<Tensor> parts(2);
  for (const Status& s :
       test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
         const auto i = static_cast<std::size_t>(rank);
         FusedMoE::Options o = test::on_gpu(8);
         o.ranks.communicator = c;
         o.ranks.cut_shared = true;
         o.parallel.ep_size = 2;
         o.parallel.ep_rank = rank;
         MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, make(o));
         MOESAIC_ASSIGN_OR_RETURN(parts[i], Tensor::zeros(DType::kF32, x.shape()));
         FusedMoE::Args call = args;
         call.shared_output = parts[i].view();
         test::must_run(layer, call);
         Tensor narrow = Tensor::zeros(DType::kBF16, x.shape()).value();
         Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
         call.shared_output = narrow.view();
         call.output = y.view();
         test::expect_refusal(layer.forward(call), StatusCode::kUnsupported,
                              {"shared_output: got BF16 of slices"});
         return {};
       })) {
    EXPECT_TRUE(s.ok()) << s.to_string();
  }
  test::expect_same(parts[0], parts[1], "ranks");
  EXPECT_LE(compare(to_doubles(parts[0].view()), to_doubles(want.view())).rel_l2, 6e-3);
}

}  // namespace
}  // namespace moesaic
