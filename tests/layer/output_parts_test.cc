// Outputs that the caller puts together: sums over ranks, shared experts apart, shared experts that
// are a function of the caller's.
#include <gtest/gtest.h>

#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "layer/rank_case.h"
#include "layer/shared_part_case.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::compare;
using test::expect_refusal;
using test::expect_same;
using test::must_run;
using test::RankCombo;
using test::RankProblem;
using test::to_doubles;

RankProblem unreduced(const test::LayerTensors& tensors, std::int64_t tokens) {
  RankProblem p;
  p.make = test::maker_of(tensors);
  p.options.max_tokens = 5;
  p.options.num_threads = 1;
  p.options.ranks.reduce_results = false;
  p.x = test::random_hidden(77, tokens, tensors.spec.hidden_size);
  test::solve_on_one_rank(p);
  return p;
}

FusedMoE::Options two_ranks(int rank, bool experts, const std::shared_ptr<Communicator>& c) {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.max_tokens = 4;
  o.ranks.communicator = c;
  (experts ? o.parallel.ep_size : o.parallel.tp_size) = 2;
  (experts ? o.parallel.ep_rank : o.parallel.tp_rank) = rank;
  return o;
}

TEST(OutputParts, EveryCombinationOfRanksIsCompletedByOneSum) {
  for (const test::Feature& f : test::rank_specs()) {
    const test::LayerTensors tensors = test::make_tensors(41, f.spec());
    const RankProblem problem = unreduced(tensors, 11);
    for (const int ranks : {2, 4}) {
      for (const RankCombo& combo : test::rank_combos(ranks)) {
        if (combo.transport == RankTransport::kBatched || combo.tp == 1) continue;
        const auto tokens = test::uneven_tokens(5, 11, combo.dp * combo.pcp);
        EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << f.name << " " << combo.name();
      }
    }
  }
}

// Without the sum an output is a part; with it the bits are those of a layer that adds up itself.
TEST(OutputParts, AnOutputThatIsNotReducedIsAPart) {
  const test::LayerTensors tensors = test::make_tensors(42, test::with_shared(true));
  const auto make = test::maker_of(tensors);
  const Tensor x = test::random_hidden(43, 7, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  for (const bool experts : {false, true}) {
    std::vector<Tensor> parts(2), sums(2), want(2);
    for (const Status& s :
         test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
           const auto i = static_cast<std::size_t>(rank);
           FusedMoE::Options options = two_ranks(rank, experts, c);
           MOESAIC_ASSIGN_OR_RETURN(const FusedMoE whole, make(options));
           EXPECT_TRUE(whole.output_is_reduced());
           want[i] = std::move(must_run(whole, args).output);
           options.ranks.reduce_results = false;
           MOESAIC_ASSIGN_OR_RETURN(const FusedMoE part, make(options));
           EXPECT_FALSE(part.output_is_reduced());
           sums[i] = std::move(must_run(part, args).output);
           parts[i] = Tensor::zeros(DType::kF32, x.shape()).value();
           std::memcpy(parts[i].data(), sums[i].data(), static_cast<std::size_t>(x.bytes() * 2));
           return part.maybe_all_reduce(sums[i].view());
         })) {
      EXPECT_TRUE(s.ok()) << s.to_string();
    }
    expect_same(sums[0], want[0], "rank 0");
    expect_same(sums[1], want[1], "rank 1");
    EXPECT_GT(compare(to_doubles(parts[0].view()), to_doubles(want[0].view())).rel_l2, 0.1);
    EXPECT_GT(compare(to_doubles(parts[1].view()), to_doubles(want[1].view())).rel_l2, 0.1);
  }
}

TEST(OutputParts, NarrowOutputsAreAddedInFp32) {
  const test::LayerTensors tensors = test::make_tensors(44, test::small_spec());
  const auto make = test::maker_of(tensors);
  const Tensor x = test::random_hidden(45, 7, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  const Tensor want = must_run(make({}).value(), args).output;
  for (const Status& s :
       test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
         FusedMoE::Options options = two_ranks(rank, false, c);
         options.ranks.reduce_results = false;
         MOESAIC_ASSIGN_OR_RETURN(const FusedMoE part, make(options));
         Tensor y = std::move(must_run(part, args, DType::kBF16).output);
         MOESAIC_RETURN_IF_ERROR(part.maybe_all_reduce(y.view()));
         EXPECT_LE(compare(to_doubles(y.view()), to_doubles(want.view())).rel_l2, 6e-3);
         Tensor ints = Tensor::zeros(DType::kI32, {2, 2}).value();
         expect_refusal(part.maybe_all_reduce(ints.view()), StatusCode::kInvalidDType, {"x"});
         return {};
       })) {
    EXPECT_TRUE(s.ok()) << s.to_string();
  }
}

TEST(OutputParts, WithoutACommunicatorTheCallerAdds) {
  const test::LayerTensors tensors = test::make_tensors(46, test::small_spec());
  FusedMoE::Options options;
  EXPECT_TRUE(test::make_layer(tensors, options).output_is_reduced());
  options.parallel.ep_size = 2;
  const FusedMoE part =
      FusedMoE::create(test::rank_weights(tensors, options.parallel), options).value();
  EXPECT_FALSE(part.output_is_reduced());
  Tensor y = Tensor::zeros(DType::kF32, {2, 64}).value();
  expect_refusal(part.maybe_all_reduce(y.view()), StatusCode::kUnsupported,
                 {"maybe_all_reduce", "communicator"});
}

TEST(OutputParts, TheSharedPartApartAddsUpToTheSum) {
  for (const auto& spec : {test::with_shared(true), test::scaled_output(), test::deepseek_like()}) {
    const test::LayerTensors tensors = test::make_tensors(47, spec);
    FusedMoE::Options options;
    options.max_tokens = 5;
    const FusedMoE layer = test::make_layer(tensors, options);
    options.include_shared = false;
    const FusedMoE routed_only = test::make_layer(tensors, options);
    const Tensor x = test::random_hidden(48, 12, 64);
    FusedMoE::Args args;
    args.hidden_states = x.view();
    const Tensor want = must_run(layer, args).output;
    Tensor shared = Tensor::zeros(DType::kF32, x.shape()).value();
    test::poison(shared.view());
    args.shared_output = shared.view();
    Tensor sum = must_run(layer, args).output;
    args.shared_output = {};
    expect_same(sum, must_run(routed_only, args).output, "the routed part");
    // Of a caller who has kept the shared experts' weights, as WeightLoader's experts_only leaves them.
    MoeLayerWeights kept = tensors.weights();
    kept.shared = nullptr;
    kept.tensors.shared_gate_weight = Tensor();
    const Result<FusedMoE> without = FusedMoE::create(std::move(kept), options);
    ASSERT_TRUE(without.ok()) << without.status().to_string();
    expect_same(sum, must_run(*without, args).output, "the routed part, nothing shared loaded");
    for (std::int64_t i = 0; i < 12 * 64; ++i) sum.as<float>()[i] += shared.as<float>()[i];
    expect_same(sum, want, "the sum");
    args.shared_output = shared.view();
    expect_refusal(test::run_args(routed_only, args).status(), StatusCode::kInvalidArgument,
                   {"shared_output", "no shared experts"});
    args.shared_output.shape = {12, 32};
    expect_refusal(test::run_args(layer, args).status(), StatusCode::kInvalidShape,
                   {"shared_output"});
    args.shared_output = {const_cast<std::byte*>(x.data()), DType::kBF16, x.shape()};
    expect_refusal(test::run_args(layer, args).status(), StatusCode::kAliasing,
                   {"shared_output", "hidden_states"});
  }
}

TEST(OutputParts, TheSharedPartIsCompleteOverRanks) {
  const test::LayerTensors tensors = test::make_tensors(49, test::with_shared(true));
  test::expect_shared_part_over_ranks(test::maker_of(tensors), {}, test::random_hidden(50, 7, 64),
                                      two_ranks, [](bool) { return 1e-6; });
}

TEST(OutputParts, SharedExpertsMayBeTheCallersFunction) {
  const test::LayerTensors tensors = test::make_tensors(51, test::small_spec());
  const auto make = test::maker_of(tensors);
  const Tensor x = test::random_hidden(52, 11, 64);
  FusedMoE::Args args;
  args.hidden_states = x.view();
  FusedMoE::Options options;
  options.max_tokens = 4;
  const Tensor routed = must_run(make(options).value(), args).output;
  std::mutex mutex;
  std::int64_t rows = 0;
  const auto shared = [&](ConstTensorView in, TensorView out) {
    for (std::int64_t i = 0; i < out.dim(0) * 64; ++i) {
      const std::uint32_t code = in.as<std::uint16_t>()[i / 64 * in.strides[0] + i % 64];
      const std::uint32_t bits = code << 16;
      float v = 0;
      std::memcpy(&v, &bits, 4);
      out.as<float>()[i] = 3 * v;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    rows += out.dim(0);
    return Status();
  };
  const auto xs = to_doubles(x.view());
  const auto check = [&](const Tensor& got, const char* what) {
    auto want = to_doubles(routed.view());
    for (std::size_t i = 0; i < want.size(); ++i) want[i] += 3 * xs[i];
    const auto result = compare(to_doubles(got.view()), want);
    EXPECT_LE(result.rel_l2, 1e-6) << what << " " << result.describe;
  };
  options.shared_experts = shared;
  check(must_run(make(options).value(), args).output, "one rank");
  EXPECT_EQ(rows, 11);
  for (const bool experts : {false, true}) {
    rows = 0;
    for (const Status& s :
         test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
           FusedMoE::Options o = two_ranks(rank, experts, c);
           o.shared_experts = shared;
           MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, make(o));
           check(must_run(layer, args).output, "two ranks");
           return {};
         })) {
      EXPECT_TRUE(s.ok()) << s.to_string();
    }
    EXPECT_EQ(rows, 11) << "each row once";
  }
  options.shared_experts = [](ConstTensorView, TensorView) -> Status {
    throw std::runtime_error("no room");
  };
  expect_refusal(test::run_args(make(options).value(), args).status(), StatusCode::kInvalidArgument,
                 {"shared_experts", "no room"});
  const test::LayerTensors own = test::make_tensors(53, test::with_shared(false));
  expect_refusal(FusedMoE::create(own.weights(), options).status(), StatusCode::kInvalidArgument,
                 {"shared_experts", "include_shared = false"});
}

}  // namespace
}  // namespace moesaic
