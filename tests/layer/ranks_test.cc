// FusedMoE over ranks (threads): equal to one rank however it is spread.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "layer/rank_case.h"
#include "layer/rank_plan.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"
#include "support/source_folder.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::RankCombo;
using test::RankProblem;

RankProblem problem_of(const test::LayerTensors& tensors, std::int64_t tokens,
                       const std::string& quant = "as-is") {
  RankProblem p;
  p.make = test::maker_of(tensors);
  p.options.quant = quant;
  p.options.max_tokens = 5;  // several steps, some of them without rows on some ranks
  p.options.num_threads = 1;
  p.x = test::random_hidden(77, tokens, tensors.spec.hidden_size);
  test::solve_on_one_rank(p);
  return p;
}

TEST(RankedLayer, EveryCombinationOfFourRanksEqualsOneRank) {
  for (const test::Feature& f : test::rank_specs()) {
    const test::LayerTensors tensors = test::make_tensors(41, f.spec());
    const RankProblem problem = problem_of(tensors, 19);
    for (const RankCombo& combo : test::rank_combos(4)) {
      const auto tokens = test::uneven_tokens(5, 19, combo.dp * combo.pcp);
      const std::string wrong = test::run_ranks(problem, combo, tokens);
      EXPECT_EQ(wrong, "") << f.name << " " << combo.name();
    }
  }
}

TEST(RankedLayer, EveryCombinationOfTwoAndThreeRanksEqualsOneRank) {
  MoeLayerSpec spec = test::rank_specs().front().spec();
  spec.intermediate_size = 36;
  const test::LayerTensors tensors = test::make_tensors(42, spec);
  const RankProblem problem = problem_of(tensors, 8, "f32");
  for (const int ranks : {2, 3}) {
    for (const RankCombo& combo : test::rank_combos(ranks)) {
      std::vector<std::int64_t> tokens(static_cast<std::size_t>(combo.dp * combo.pcp), 0);
      tokens.back() = 8;  // all others have nothing
      EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << combo.name();
    }
  }
}

// Rows for FP8 blocks of other sizes travel as they are: what quantises them has their groups.
TEST(RankedLayer, BlocksOfOtherSizesOnTwoRanksEqualOneRank) {
  MoeLayerSpec spec = test::rank_specs().front().spec();
  spec.quant = test::scheme_called("fp8-block-16x32");
  const test::LayerTensors tensors = test::make_tensors(43, spec);
  const RankProblem problem = problem_of(tensors, 7);
  int ran = 0;
  for (const RankCombo& combo : test::rank_combos(2)) {
    if (!combo.ep) continue;  // the helper does not cut scales
    const auto tokens = test::uneven_tokens(6, 7, combo.dp * combo.pcp);
    EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << combo.name();
    ++ran;
  }
  EXPECT_GT(ran, 5);
}

// Llama 4 with several experts a token: a row that travels once for all of them is weighted where it
// arrives, one that travels for each of them takes its weight along.
TEST(RankedLayer, WeightsOnTheInputsOfSeveralExpertsEqualOneRank) {
  MoeLayerSpec spec = test::llama4_like();
  spec.routing.top_k = 3;
  const test::LayerTensors tensors = test::make_tensors(44, spec);
  for (const char* quant : {"bf16", "fp8-block"}) {
    const RankProblem problem = problem_of(tensors, 9, quant);
    int ran = 0;
    for (const RankCombo& combo : test::rank_combos(2)) {
      const bool cut_codes = !combo.ep && quant == std::string("fp8-block");
      if (cut_codes) continue;  // the helper does not cut scales
      const auto tokens = test::uneven_tokens(7, 9, combo.dp * combo.pcp);
      EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << quant << " " << combo.name();
      ++ran;
    }
    EXPECT_GT(ran, 5);
  }
}

// Shapes, routing and tokens at random: ranks without tokens, experts without tokens, more ranks
// than experts.
TEST(RankedLayer, RandomShapesAndUnevenTokensEqualOneRank) {
  constexpr int kCases = 40;
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    test::Rng rng(900 + seed);
    MoeLayerSpec spec = test::small_spec();
    spec.num_experts = spec.routing.num_experts = rng.integer(2, 11);
    spec.routing.top_k = rng.integer(1, std::min<std::int64_t>(5, spec.num_experts));
    spec.hidden_size = 8 * rng.integer(2, 9);
    spec.intermediate_size = 24 * rng.integer(1, 3);
    spec.shared.intermediate_size = rng.integer(0, 1) * 16;
    spec.shared.gated_output = spec.shared.intermediate_size > 0 && rng.integer(0, 1) == 1;
    const test::LayerTensors tensors = test::make_tensors(seed, spec);
    RankProblem problem = problem_of(tensors, rng.integer(0, 30));
    problem.options.max_tokens = rng.integer(1, 32);
    std::vector<RankCombo> combos;
    for (const int ranks : {2, 3, 4, 6}) {
      for (const RankCombo& c : test::rank_combos(ranks)) combos.push_back(c);
    }
    for (int i = 0; i < 3; ++i) {
      const RankCombo& combo =
          combos[static_cast<std::size_t>(rng.integer(0, std::ssize(combos) - 1))];
      const auto tokens = test::uneven_tokens(seed, problem.x.shape()[0], combo.dp * combo.pcp);
      EXPECT_EQ(test::run_ranks(problem, combo, tokens), "")
          << "seed " << seed << " " << combo.name();
    }
  }
}

// With 8 ranks, as processes: mpi_matrix.cc.
TEST(RankedLayer, GoldenCheckpointsOnFourRanksEqualOneRank) {
  for (const char* model : {"mini-qwen3-moe", "mini-deepseek-v3", "mini-gpt-oss"}) {
    const std::string folder = test::bundled_model(model);
    const Checkpoint checkpoint = Checkpoint::open(folder).value();
    for (const char* quant : {"f32", "as-is", "fp8-bf16"}) {
      const RankProblem problem = test::checkpoint_problem(checkpoint, folder, quant, 21);
      std::uint64_t seed = 0;
      for (const RankCombo& combo : test::rank_combos(4)) {
        // Slices of fewer than 128 columns cut the blocks of fp8 scales.
        if (!combo.ep && std::string(quant) == "fp8-bf16") continue;
        const auto tokens = test::uneven_tokens(++seed, 21, combo.dp * combo.pcp);
        // All ways in the exact arithmetic, some in the others.
        if (std::string(quant) != "f32" && seed % 4 != 0) continue;
        EXPECT_EQ(test::run_ranks(problem, combo, tokens), "")
            << model << " " << quant << " " << combo.name();
      }
    }
  }
}

TEST(RankedLayer, TransformsSeeCompleteRows) {
  MoeLayerSpec spec = test::small_spec();
  spec.shared.intermediate_size = 48;
  const test::LayerTensors tensors = test::make_tensors(43, spec);
  RankProblem problem;
  problem.make = test::maker_of(tensors);
  problem.options.num_threads = 1;
  problem.options.max_tokens = 6;
  problem.options.transform.hidden_size = spec.hidden_size;
  problem.options.transform.input = [](ConstTensorView x, TensorView to) {
    for (std::int64_t i = 0; i < to.dim(0) * to.dim(1); ++i) {
      to.as<std::uint16_t>()[i] = x.as<std::uint16_t>()[i / x.dim(1) * x.strides[0] + i % x.dim(1)];
    }
    return Status();
  };
  // Not linear: of a partial sum it would be something else.
  problem.options.transform.output = [](ConstTensorView x, TensorView to) {
    for (std::int64_t i = 0; i < to.dim(0) * to.dim(1); ++i) {
      to.as<float>()[i] = x.as<float>()[i] * x.as<float>()[i];
    }
    return Status();
  };
  problem.x = test::random_hidden(78, 13, spec.hidden_size);
  test::solve_on_one_rank(problem);
  for (const RankCombo& combo : test::rank_combos(4)) {
    const auto tokens = test::uneven_tokens(6, 13, combo.dp * combo.pcp);
    EXPECT_EQ(test::run_ranks(problem, combo, tokens), "") << combo.name();
  }
}

// --- What every rank must do alike ---------------------------------------------------------------

FusedMoE::Options options_of(int rank, int dp, const std::shared_ptr<Communicator>& communicator) {
  FusedMoE::Options o;
  o.num_threads = 1;
  o.max_tokens = 4;
  o.ranks.communicator = communicator;
  o.parallel.ep_size = 2;
  o.parallel.ep_rank = rank;
  o.parallel.dp_size = dp;
  o.parallel.dp_rank = dp > 1 ? rank : 0;
  return o;
}

TEST(RankedLayer, ARefusalOnOneRankIsAnErrorOnAll) {
  const test::LayerTensors tensors = test::make_tensors(44, test::small_spec());
  const auto make = test::maker_of(tensors);
  const auto status = test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>& c) {
    const auto layer = make(options_of(rank, 2, c));
    if (!layer.ok()) return layer.status();
    // Rank 1 passes rows of another width; the next call of both succeeds.
    const Tensor x = Tensor::zeros(DType::kBF16, {2, rank == 0 ? 64 : 32}).value();
    Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
    Status first = layer->forward(x.view(), y.view());
    const Tensor good = test::random_hidden(3, 2 + rank, 64);
    Tensor out = Tensor::zeros(DType::kF32, good.shape()).value();
    const Status second = layer->forward(good.view(), out.view());
    return second.ok() ? first : second;
  });
  expect_refusal(status[0], StatusCode::kInvalidArgument,
                 {"forward", "rank 1 refused: invalid_shape: hidden_states", "[2, 32]"});
  expect_refusal(status[1], StatusCode::kInvalidShape, {"hidden_states", "[2, 32]"});
}

TEST(RankedLayer, HealthIsTheFailureThatEndedACall) {
  const test::LayerTensors tensors = test::make_tensors(49, test::small_spec());
  const auto make = test::maker_of(tensors);
  for (const Status& s :
       test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) -> Status {
         const auto layer = make(options_of(rank, 2, c));
         if (!layer.ok()) return layer.status();
         const Tensor x = test::random_hidden(3, 2, 64);
         Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
         MOESAIC_RETURN_IF_ERROR(layer->forward(x.view(), y.view()));
         EXPECT_TRUE(layer->health().ok());
         if (rank == 1) static_cast<void>(c->abandon("enough of it"));
         EXPECT_FALSE(layer->forward(x.view(), y.view()).ok());
         return layer->health();
       })) {
    expect_refusal(s, StatusCode::kDevice, {"enough of it"});
  }
}

// A rank's ids are its own affair, its mistakes are everybody's; afterwards all go on.
TEST(RankedLayer, AWrongGivenIdOnOneRankIsAnErrorOnAll) {
  const test::LayerTensors tensors = test::make_tensors(48, test::small_spec());
  const auto make = test::maker_of(tensors);
  for (const RankTransport transport : {RankTransport::kAllToAll, RankTransport::kBatched}) {
    const auto status = test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>& c) {
      FusedMoE::Options options = options_of(rank, 2, c);
      options.ranks.transport = transport;
      const auto layer = make(options);
      const Tensor x = test::random_hidden(3, 2, 64);
      Tensor y = Tensor::zeros(DType::kF32, x.shape()).value();
      std::vector<std::int32_t> ids = {0, 5, rank == 1 ? 8 : 3, 7};
      const std::vector<float> weights = {1, 2, 3, 4};
      FusedMoE::Args args;
      args.hidden_states = x.view();
      args.output = y.view();
      args.topk_weights = {reinterpret_cast<const std::byte*>(weights.data()), DType::kF32, {2, 2}};
      args.topk_ids = {reinterpret_cast<const std::byte*>(ids.data()), DType::kI32, {2, 2}};
      const Status first = layer->forward(args);
      ids[2] = 3;
      const Status second = layer->forward(args);
      return second.ok() ? first : second;
    });
    expect_refusal(status[0], StatusCode::kInvalidArgument, {"forward", "rank 1 refused"});
    expect_refusal(status[1], StatusCode::kInvalidArgument, {"topk_ids: got 8 at [1, 0]"});
  }
}

// Slabs hold one row of a token per expert; all other transports take an expert twice.
TEST(RankedLayer, AnExpertTwiceInARowIsRefusedByBatchedOnly) {
  const test::LayerTensors tensors = test::make_tensors(49, test::small_spec());
  const auto make = test::maker_of(tensors);
  const Tensor x = test::random_hidden(3, 2, 64);
  const std::vector<std::int32_t> ids = {5, 5, 0, 1};
  const std::vector<float> weights = {1, 2, 3, 4};
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.topk_weights = {reinterpret_cast<const std::byte*>(weights.data()), DType::kF32, {2, 2}};
  args.topk_ids = {reinterpret_cast<const std::byte*>(ids.data()), DType::kI32, {2, 2}};
  const Tensor want = test::must_run(make({}).value(), args).output;
  struct Way {
    RankTransport transport;
    bool copies;  // two of each expert, one for each slot of a row
  };
  for (const auto& [transport, copies] :
       {Way{RankTransport::kGather, false}, Way{RankTransport::kAllToAll, false},
        Way{RankTransport::kAllToAll, true}, Way{RankTransport::kBatched, false},
        Way{RankTransport::kBatched, true}}) {
    for (const Status& s : test::on_two_ranks([&, transport = transport, copies = copies](
                                                  int rank, const std::shared_ptr<Communicator>&c) {
           FusedMoE::Options options = options_of(rank, 2, c);
           options.ranks.transport = transport;
           options.ranks.enable_eplb = copies;
           options.ranks.num_redundant_experts = copies ? 8 : 0;
           const auto layer = copies ? FusedMoE::create(tensors.weights(), options) : make(options);
           const auto run = test::run_args(*layer, args);
           if (!run.ok()) return run.status();
           const auto result =
               test::compare(test::to_doubles(run->output.view()), test::to_doubles(want.view()));
           return result.rel_l2 <= 1e-6 ? Status() : Status(StatusCode::kInternal, result.describe);
         })) {
      if (transport == RankTransport::kBatched) {
        expect_refusal(s, StatusCode::kInvalidArgument, {"expert 5 twice"});
      } else {
        EXPECT_TRUE(s.ok()) << s.to_string();
      }
    }
  }
}

TEST(RankedLayer, LayersThatDifferAreRefusedOnAllRanks) {
  const test::LayerTensors tensors = test::make_tensors(45, test::small_spec());
  const auto make = test::maker_of(tensors);
  for (const Status& s : test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) {
         FusedMoE::Options o = options_of(rank, 2, c);
         o.max_tokens += rank;
         return make(o).status();
       })) {
    expect_refusal(s, StatusCode::kInvalidArgument, {"layer", "other options"});
  }
  const auto status = test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>& c) {
    FusedMoE::Options o = options_of(rank, 2, c);
    if (rank == 1) o.backend = "no_such_backend";
    return make(o).status();
  });
  expect_refusal(status[0], StatusCode::kInvalidArgument, {"layer", "rank 1 refused"});
  expect_refusal(status[1], StatusCode::kNotFound, {"no_such_backend"});
}

TEST(RankedLayer, ReplicasNeedTheSameRows) {
  const test::LayerTensors tensors = test::make_tensors(46, test::small_spec());
  const auto make = test::maker_of(tensors);
  for (const Status& s : test::on_two_ranks([&](int rank, const std::shared_ptr<Communicator>&c) {
         const auto layer = make(options_of(rank, 1, c));
         const Tensor x = test::random_hidden(3, 2 + rank, 64);
         Tensor out = Tensor::zeros(DType::kF32, x.shape()).value();
         return layer->forward(x.view(), out.view());
       })) {
    expect_refusal(s, StatusCode::kInvalidArgument, {"hidden_states", "3", "same rows"});
  }
}

TEST(RankedLayer, RefusesByName) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  FusedMoE::Options o = options_of(0, 2, pair);
  EXPECT_TRUE(layer::plan_ranks(o, 2).ok());
  o.parallel.ep_rank = o.parallel.dp_rank = 1;
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kInvalidArgument,
                 {"communicator: got rank 0 of 2", "rank 1 of 2"});
  o = options_of(0, 2, pair);
  o.ranks.transport = RankTransport::kNone;
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kUnsupported,
                 {"transport: got none"});
  o = options_of(0, 2, pair);
  std::swap(o.parallel.tp_size, o.parallel.ep_size);
  o.ranks.transport = RankTransport::kAllToAll;
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kUnsupported,
                 {"transport: got all_to_all", "slice"});
  o.ranks.transport = RankTransport::kAuto;
  o.ranks.reduction = RankReduction::kPerSlot;
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kUnsupported,
                 {"reduction: got per_slot", "tp_size 2"});
  o = options_of(0, 2, pair);
  o.ranks.reduction = RankReduction::kPerSlot;
  o.max_tokens = std::int64_t{1} << 29;
  expect_refusal(layer::plan_ranks(o, 4).status(), StatusCode::kLimitExceeded,
                 {"max_tokens", "2^31-1"});
}

// Results on their way back in bf16: one more rounding of each partial sum, on every transport that
// has some.
TEST(RankedLayer, RoundedPartialSumsStayWithinTheirBound) {
  const test::LayerTensors tensors = test::make_tensors(47, test::rank_specs().front().spec());
  RankProblem problem = problem_of(tensors, 19, "f32");
  problem.options.ranks.combine_dtype = DType::kBF16;
  for (const RankTransport transport : {RankTransport::kAllToAll, RankTransport::kGather}) {
    RankCombo combo;
    combo.dp = 2;
    combo.ep = true;
    combo.transport = transport;
    problem.bound = 0x1p-8;
    EXPECT_EQ(test::run_ranks(problem, combo, {8, 11}), "");
    problem.bound = 1e-6;
    EXPECT_NE(test::run_ranks(problem, combo, {8, 11}), "") << "nothing was rounded";
  }
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  FusedMoE::Options o = options_of(0, 2, pair);
  o.ranks.combine_dtype = DType::kBF16;
  EXPECT_TRUE(layer::plan_ranks(o, 2).ok());
  o.ranks.reduction = RankReduction::kPerSlot;
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kUnsupported,
                 {"combine_dtype: got BF16", "per_slot", "need F32"});
  o.ranks.combine_dtype = DType::kF16;
  expect_refusal(layer::plan_ranks(o, 2).status(), StatusCode::kInvalidDType,
                 {"combine_dtype: got F16, need F32 or BF16"});
}

// Without weights: nobody has the memory.
TEST(RankPlan, RowsOfAllRanksAndAllTheirSlotsHaveALimit) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  MoeLayerSpec spec = test::small_spec();
  auto world = make_in_process_communicators(2).value();
  FusedMoE::Options o = options_of(0, 2, std::shared_ptr<Communicator>(std::move(world[0])));
  for (const bool slots : {false, true}) {
    o.ranks.reduction = slots ? RankReduction::kPerSlot : RankReduction::kPerRank;
    o.max_tokens = kMost / 2 / (slots ? spec.routing.top_k : 1);
    EXPECT_TRUE(explain_layer(spec, o).ok());
    ++o.max_tokens;
    expect_refusal(explain_layer(spec, o).status(), StatusCode::kLimitExceeded,
                   {"max_tokens", "rows of 2 ranks", slots ? "and all slots" : "exceed 2^31-1"});
  }
  // Sizes whose bytes do not fit 63 bits, of identity experts and of slots.
  o.max_tokens = kMost / 2 / spec.routing.top_k;
  spec.hidden_size = kMost;
  expect_refusal(explain_layer(spec, o).status(), StatusCode::kLimitExceeded, {"workspace"});
  spec = test::with_identity_experts();
  spec.hidden_size = kMost;
  FusedMoE::Options alone;
  alone.max_tokens = kMost;
  expect_refusal(explain_layer(spec, alone).status(), StatusCode::kLimitExceeded, {"workspace"});
}

TEST(RankPlan, SharesOfReplicasCoverEveryRowOnce) {
  for (std::int64_t rows = 0; rows < 20; ++rows) {
    for (int replicas = 1; replicas <= 8; ++replicas) {
      std::int64_t next = 0;
      for (int r = 0; r < replicas; ++r) {
        const layer::RowRange share = layer::replica_share(rows, replicas, r);
        EXPECT_EQ(share.first, next);
        EXPECT_LE(share.count, (rows + replicas - 1) / replicas);
        next += share.count;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

}  // namespace
}  // namespace moesaic
