#include <gtest/gtest.h>

#include "prepare_finalize/transport_case.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::kTransports;
using test::run_transport;
using test::StandardCase;
using test::Transport;
using test::transport_name;
using test::TransportRun;
using test::TransportSetup;

// Uneven tokens, empty ranks, ranks without experts, slots without an expert.
const std::vector<std::vector<std::int64_t>> kCounts = {
    {7}, {5, 0}, {0, 9}, {1, 6, 3}, {4, 0, 16, 2}, {3, 3, 0, 1, 5, 2, 0, 4}};

std::int64_t total(const std::vector<std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t n : counts) sum += n;
  return sum;
}

std::string first_backend(const StandardCase& c) {
  return std::string(choose_experts(c.problem).value()->name);
}

Tensor checked(TransportRun run) {
  for (const test::RankRun& rank : run.ranks) {
    for (const Status& status : rank.calls) EXPECT_TRUE(status.ok()) << status.message();
  }
  return std::move(run.output);
}

TEST(AllToAll, EqualsOneRankForEveryPlacementAndTransport) {
  for (const Transport transport : kTransports) {
    for (const auto placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
      for (const char* quant : {"f32", "bf16", "fp8-block"}) {
        for (std::size_t i = 0; i < kCounts.size(); ++i) {
          SCOPED_TRACE(std::string(quant) + " " + transport_name(transport) + " " +
                       std::string(expert_placement_name(placement)) + " case " +
                       std::to_string(i));
          const StandardCase c = test::make_case(100 + i, test::small_problem(quant),
                                                 total(kCounts[i]), DType::kBF16, 0.1);
          const std::string backend = first_backend(c);
          const Tensor want = test::run_standard(*test::make_backend(backend, c), c);
          const Tensor got = checked(run_transport(
              c, kCounts[i], {.transport = transport, .placement = placement, .backend = backend}));
          if (transport == Transport::kBatched) {
            // The k results of a row are added up as on one rank.
            std::string why;
            EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
            continue;
          }
          const auto result =
              test::compare(test::to_doubles(got.view()), test::to_doubles(want.view()));
          // A few roundings of fp32 sums.
          EXPECT_LE(result.rel_l2, 16.0 / (1 << 24)) << result.describe;
        }
      }
    }
  }
}

TEST(AllToAll, OneExpertPerTokenIsBitIdentical) {
  for (const bool on_input : {false, true}) {
    for (const char* quant : {"bf16", "fp8-block"}) {
      MoeProblem problem = test::small_problem(quant);
      problem.top_k = 1;
      problem.apply_router_weight_on_input = on_input;
      const StandardCase c = test::make_case(7, problem, 22, DType::kF32);
      const std::string backend = first_backend(c);
      const Tensor want = test::run_standard(*test::make_backend(backend, c), c);
      for (const Transport transport : kTransports) {
        SCOPED_TRACE(std::string(quant) + " " + transport_name(transport));
        const Tensor got =
            checked(run_transport(c, {4, 0, 16, 2}, {.transport = transport, .backend = backend}));
        std::string why;
        EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
      }
    }
  }
}

// Weights on the input of several experts: a row that travels once for all of them is weighted, and
// quantised, where it arrives; in slabs each expert gets the row times its own weight.
TEST(AllToAll, WeightsOnTheInputsOfSeveralExpertsEqualOneRank) {
  for (const char* quant : {"f32", "bf16", "fp8-block"}) {
    MoeProblem problem = test::small_problem(quant);
    problem.apply_router_weight_on_input = true;
    ASSERT_GT(problem.top_k, 1);
    const StandardCase c = test::make_case(8, problem, 22, DType::kF32, 0.1);
    const std::string backend = first_backend(c);
    const Tensor want = test::run_standard(*test::make_backend(backend, c), c);
    for (const Transport transport : kTransports) {
      SCOPED_TRACE(std::string(quant) + " " + transport_name(transport));
      const Tensor got =
          checked(run_transport(c, {4, 0, 16, 2}, {.transport = transport, .backend = backend}));
      const auto result =
          test::compare(test::to_doubles(got.view()), test::to_doubles(want.view()));
      // In slabs the k results of a row are added up as on one rank.
      EXPECT_LE(result.rel_l2, transport == Transport::kBatched ? 0.0 : 16.0 / (1 << 24))
          << result.describe;
    }
  }
}

// The experts see the same codes and scales wherever these were made, on every backend that takes
// both, with scales that are powers of two as well.
TEST(AllToAll, QuantisingBeforeDispatchChangesNoBitAndHalvesTheBytes) {
  for (const bool power_of_two : {false, true}) {
    MoeProblem problem = test::small_problem("fp8-block");
    if (power_of_two) problem.quant.activation.scale_format = ScaleFormat::kE8M0;
    const StandardCase c = test::make_case(21, problem, 25, DType::kBF16, 0.1);
    for (const std::string& backend : {first_backend(c), std::string("cpu_reference")}) {
      for (const Transport transport : kTransports) {
        SCOPED_TRACE(backend + " " + transport_name(transport));
        TransportSetup setup{.transport = transport, .backend = backend};
        TransportRun before = run_transport(c, {9, 16, 0}, setup);
        setup.quantize_before_dispatch = false;
        TransportRun after = run_transport(c, {9, 16, 0}, setup);
        EXPECT_LT(before.ranks[1].bytes_sent, after.ranks[1].bytes_sent);
        std::string why;
        EXPECT_TRUE(test::same_bits(checked(std::move(before)).view(),
                                    checked(std::move(after)).view(), &why))
            << why;
      }
    }
  }
}

// Whatever a scheme quantises, and to what: rows arrive with the precision that it starts from.
TEST(AllToAll, EverySchemeTravels) {
  for (const Scheme& scheme : quant_schemes()) {
    const StandardCase c = test::make_case(61, test::small_problem(scheme.name), 20, DType::kBF16);
    const std::string backend = first_backend(c);
    const Tensor want = test::run_standard(*test::make_backend(backend, c), c);
    for (const Transport transport : kTransports) {
      SCOPED_TRACE(std::string(scheme.name) + " " + transport_name(transport));
      const Tensor got =
          checked(run_transport(c, {9, 0, 11}, {.transport = transport, .backend = backend}));
      const auto result =
          test::compare(test::to_doubles(got.view()), test::to_doubles(want.view()));
      EXPECT_LE(result.rel_l2, 16.0 / (1 << 24)) << result.describe;
    }
  }
}

// One NaN makes its row's result NaN and no other's, quantised or not.
TEST(AllToAll, ANaNTravelsInItsRowOnly) {
  StandardCase c = test::make_case(3, test::small_problem("fp8-block"), 8, DType::kBF16);
  c.hidden_states.as<std::uint16_t>()[2 * c.problem.hidden_size + 5] = 0x7FC0;
  for (const Transport transport : kTransports) {
    const Tensor got = checked(run_transport(c, {4, 4}, {.transport = transport}));
    for (std::int64_t t = 0; t < 8; ++t) {
      bool nan = false;
      for (std::int64_t h = 0; h < c.problem.hidden_size; ++h) {
        const float v = got.as<float>()[t * c.problem.hidden_size + h];
        nan = nan || v != v;
      }
      EXPECT_EQ(nan, t == 2) << transport_name(transport) << " row " << t;
    }
  }
}

// Partial results in bf16: half the bytes back, one rounding of 2^-9 each.
TEST(AllToAll, ResultsMayTravelInBF16WithinTheirRounding) {
  const StandardCase c = test::make_case(31, test::small_problem("bf16"), 24, DType::kBF16);
  const Tensor want = test::run_standard(*test::make_backend(first_backend(c), c), c);
  for (const Transport transport : kTransports) {
    SCOPED_TRACE(transport_name(transport));
    const Tensor got =
        checked(run_transport(c, {8, 16}, {.transport = transport, .combine_dtype = DType::kBF16}));
    const auto result = test::compare(test::to_doubles(got.view()), test::to_doubles(want.view()));
    EXPECT_LE(result.rel_l2, 0x1p-8) << result.describe;
    EXPECT_GE(result.rel_l2, 0x1p-14) << "nothing was rounded";
  }
}

// What is wrong on one rank is the answer of every rank, at once, and the ranks go on after it.
TEST(AllToAll, ARefusalOfOneRankIsTheAnswerOfAll) {
  const StandardCase c = test::make_case(5, test::small_problem("bf16"), 14, DType::kBF16);
  Tensor bad_ids = Tensor::zeros(DType::kI32, {3, 2}).value();
  bad_ids.as<std::int32_t>()[3] = 99;
  Tensor twice = Tensor::zeros(DType::kI32, {3, 2}).value();  // expert 0 in both slots
  Tensor many_rows = Tensor::zeros(DType::kBF16, {17, c.problem.hidden_size}).value();
  Tensor many_ids = Tensor::zeros(DType::kI32, {17, 2}).value();
  Tensor many_weights = Tensor::zeros(DType::kF32, {17, 2}).value();
  Tensor many_outputs = Tensor::zeros(DType::kF32, {17, c.problem.hidden_size}).value();
  struct Case {
    StatusCode code;
    const char* word;
    std::function<void(ModularKernel::Args&)> spoil;
    bool batched_only = false;
  };
  const std::vector<Case> cases = {
      {StatusCode::kInvalidArgument, "token 1, slot 1: got expert 99",
       [&](ModularKernel::Args& a) { a.topk_ids = bad_ids.view(); }},
      {StatusCode::kLimitExceeded, "tokens: got 17, need at most",
       [&](ModularKernel::Args& a) {
         a.hidden_states = many_rows.view();
         a.topk_ids = many_ids.view();
         a.topk_weights = many_weights.view();
         a.output = many_outputs.view();
       }},
      {StatusCode::kInvalidShape, "topk_ids",
       [&](ModularKernel::Args& a) {
         a.topk_ids.shape = Shape{3, 1};
       }},
      {StatusCode::kInvalidArgument, "token 0: got expert 0 twice",
       [&](ModularKernel::Args& a) { a.topk_ids = twice.view(); }, true},
  };
  for (const Transport transport : kTransports) {
    for (const Case& wrong : cases) {
      if (wrong.batched_only && transport != Transport::kBatched) continue;
      SCOPED_TRACE(std::string(transport_name(transport)) + ": " + wrong.word);
      const TransportRun run = run_transport(
          c, {4, 3, 7}, {.transport = transport, .spoil = [&](int r, ModularKernel::Args& a) {
                           if (r == 1) wrong.spoil(a);
                         }});
      for (const test::RankRun& rank : run.ranks) {
        expect_refusal(rank.calls[0], wrong.code, {"dispatch", "rank 1: ", wrong.word});
        EXPECT_TRUE(rank.calls[1].ok()) << rank.calls[1].message();
      }
    }
  }
}

TEST(AllToAll, RefusesByName) {
  const std::shared_ptr<Communicator> self =
      std::move(make_in_process_communicators(1).value().front());
  MoeProblem problem = test::small_problem("bf16");
  problem.max_tokens = 4;
  AllToAllOptions options;
  options.max_tokens_per_rank = 4;
  const auto make = [&] {
    return make_all_to_all_prepare_finalize(problem, self, options).status();
  };
  const auto make_batched = [&] {
    return make_batched_all_to_all_prepare_finalize(problem, self, options).status();
  };
  EXPECT_TRUE(make().ok());
  problem.num_local_experts = 5;
  expect_refusal(make(), StatusCode::kInvalidArgument,
                 {"num_local_experts: got 5", "parallel gives rank 0 6"});
  problem.num_local_experts = 6;
  expect_refusal(make_batched(), StatusCode::kUnsupported, {"format", "slabs"});
  options.max_tokens_per_rank = 0;
  expect_refusal(make(), StatusCode::kInvalidArgument, {"max_tokens_per_rank: got 0"});
  options.max_tokens_per_rank = 4;
  options.parallel.ep_size = 2;
  expect_refusal(make(), StatusCode::kInvalidArgument, {"parallel", "rank 0 of 1"});
  expect_refusal(make_all_to_all_prepare_finalize(problem, nullptr, options).status(),
                 StatusCode::kInvalidArgument, {"communicator"});
  options.parallel.ep_size = 1;
  options.combine_dtype = DType::kF16;
  expect_refusal(make(), StatusCode::kInvalidDType, {"combine_dtype: got F16"});
  options.combine_dtype = DType::kF32;
  problem.format = ActivationFormat::kBatched;
  expect_refusal(make(), StatusCode::kUnsupported, {"format"});
  EXPECT_TRUE(make_batched().ok());
  problem.max_tokens = 5;
  expect_refusal(make_batched(), StatusCode::kInvalidArgument, {"max_tokens: got 5", "= 4"});
  problem.max_tokens = 4;
  problem.num_local_experts = 5;
  expect_refusal(make_batched(), StatusCode::kInvalidArgument, {"num_local_experts: got 5"});
  problem.num_local_experts = problem.num_experts = 1 << 12;
  problem.hidden_size = std::int64_t{1} << 20;
  problem.max_tokens = options.max_tokens_per_rank = (std::int64_t{1} << 31) - 1;
  expect_refusal(make_batched(), StatusCode::kLimitExceeded, {"4096 experts x 2147483647 rows"});
  problem = test::small_problem("bf16");
  problem.format = ActivationFormat::kBatched;
  problem.max_tokens = options.max_tokens_per_rank = 4;
  options.gather = true;
  expect_refusal(make_batched(), StatusCode::kUnsupported, {"gather"});
}

// For who calls these without a ModularKernel; what is refused is the step's failure on all ranks.
TEST(AllToAll, TheHalvesCheckWhatTheyReadAndWrite) {
  for (const Transport transport : test::kTransports) {
    const std::shared_ptr<Communicator> self =
        std::move(make_in_process_communicators(1).value().front());
    MoeProblem problem = test::small_problem("bf16");
    AllToAllOptions options;
    problem.max_tokens = options.max_tokens_per_rank = 4;
    options.gather = transport == Transport::kGather;
    const bool batched = transport == Transport::kBatched;
    if (batched) problem.format = ActivationFormat::kBatched;
    const auto pf = batched
                        ? make_batched_all_to_all_prepare_finalize(problem, self, options).value()
                        : make_all_to_all_prepare_finalize(problem, self, options).value();
    const StandardCase c = test::make_case(5, test::small_problem("bf16"), 3, DType::kBF16);
    const Tensor workspace = test::poisoned_bytes(pf->workspace_size(4).value());
    const std::span<std::byte> bytes{const_cast<std::byte*>(workspace.data()),
                                     static_cast<std::size_t>(workspace.bytes())};
    const PrepareArgs rows{
        c.hidden_states.view(), c.routing.weights.view(), c.routing.ids.view(), {}, bytes};
    PrepareArgs narrow = rows;
    narrow.hidden_states = {c.hidden_states.data(), DType::kBF16, {3, problem.hidden_size / 2}};
    expect_refusal(pf->prepare(narrow).status(), StatusCode::kInvalidShape,
                   {"dispatch", "hidden_states: got [3, 48]"});
    PrepareArgs nowhere = rows;
    nowhere.topk_weights.data = nullptr;
    expect_refusal(pf->prepare(nowhere).status(), StatusCode::kInvalidArgument,
                   {"dispatch", "topk_weights: got a null pointer"});

    ASSERT_TRUE(pf->prepare(rows).ok());
    Tensor long_output = Tensor::zeros(DType::kF32, {5, problem.hidden_size}).value();
    const Tensor ids = Tensor::zeros(DType::kI32, {5, problem.top_k}).value();
    const Tensor weights = Tensor::zeros(DType::kF32, {5, problem.top_k}).value();
    FinalizeArgs results;
    results.output = long_output.view();
    results.topk_weights = weights.view();
    results.topk_ids = ids.view();
    results.reduction = batched ? TopKWeightAndReduce::kNaiveBatched : TopKWeightAndReduce::kNoOp;
    results.workspace = bytes;
    expect_refusal(pf->finalize(results), StatusCode::kLimitExceeded,
                   {"combine", "tokens: got 5, need at most 4"});
  }
}

// Two spreads of the experts, of the map and of `parallel`, would send rows to the wrong experts.
TEST(AllToAll, MapsOfAnotherPlacementAreRefusedByAll) {
  const StandardCase c = test::make_case(31, test::small_problem("bf16"), 6, DType::kBF16);
  const std::int64_t experts = c.problem.num_experts;
  for (const Transport transport : test::kTransports) {
    TransportSetup setup;
    setup.transport = transport;
    std::vector<std::int32_t> robin(static_cast<std::size_t>(experts), -1);
    for (std::int64_t e = 0; e < experts; e += 2) {
      robin[static_cast<std::size_t>(e)] = static_cast<std::int32_t>(e / 2);
    }
    setup.spoil = [&](int rank, ModularKernel::Args& args) {
      if (rank == 0) args.expert_map = robin;
    };
    const test::TransportRun run = test::run_transport(c, {3, 3}, setup);
    for (std::size_t r = 0; r < 2; ++r) {
      const Status& first = run.ranks[r].calls[0];
      EXPECT_TRUE(run.ranks[r].calls[1].ok()) << run.ranks[r].calls[1].message();
      if (transport == Transport::kGather) {  // whose rows go everywhere
        EXPECT_TRUE(first.ok()) << first.message();
      } else {
        expect_refusal(first, StatusCode::kInvalidArgument, {"expert_map[1]: got -1, need 1"});
      }
    }
  }
}

// Stands for experts that know nothing of quantised rows.
class PlainExperts final : public Experts {
 public:
  std::string_view name() const override { return "plain"; }
  TopKWeightAndReduce reduction() const override { return TopKWeightAndReduce::kNoOp; }
  ActivationFormat format() const override { return ActivationFormat::kStandard; }
  Result<std::int64_t> workspace_size(std::int64_t) const override { return std::int64_t{0}; }
  std::int64_t weight_bytes() const override { return 0; }
  std::string_view determinism() const override { return ""; }
  Status run(const ExpertsArgs&) const override { return {}; }
};

TEST(AllToAll, ExpertsThatTakeNoCodesAreRefused) {
  const MoeProblem problem = test::small_problem("fp8-block");
  AllToAllOptions options;
  options.max_tokens_per_rank = 4;
  const auto attach = [&] {
    return make_all_to_all_prepare_finalize(
               problem, std::move(make_in_process_communicators(1).value().front()), options)
        .value()
        ->attach(PlainExperts());
  };
  expect_refusal(attach(), StatusCode::kUnsupported, {"plain", "quantize_before_dispatch"});
  options.quantize_before_dispatch = false;
  EXPECT_TRUE(attach().ok());
}

}  // namespace
}  // namespace moesaic
