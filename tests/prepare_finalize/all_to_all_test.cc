#include <gtest/gtest.h>

#include <thread>

#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"
#include "support/experts_run.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::StandardCase;

// Some experts of another source, in the given order.
class SubsetSource final : public ExpertSource {
 public:
  SubsetSource(const StackedExpertWeights& weights, std::vector<std::int64_t> ids)
      : all_(make_stacked_source(weights)), ids_(std::move(ids)) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override {
    return all_->expert(ids_[static_cast<std::size_t>(e)]);
  }

 private:
  std::unique_ptr<ExpertSource> all_;
  std::vector<std::int64_t> ids_;
};

struct Setup {
  ExpertPlacement placement = ExpertPlacement::kLinear;
  bool gather = false;
  std::string backend;  // empty: the first that accepts
};

// Rank r of counts.size() computes the r-th stretch of the case's rows; returns all of them.
Tensor run_ranks(const StandardCase& c, const std::vector<std::int64_t>& counts,
                 const Setup& setup) {
  const int size = static_cast<int>(counts.size());
  const std::int64_t hidden = c.problem.hidden_size;
  Tensor output = Tensor::uninitialized(DType::kF32, c.hidden_states.shape()).value();
  test::poison(output.view());
  auto ranks = make_in_process_communicators(size, {.timeout_ms = 20'000}).value();
  const auto body = [&](int r, std::int64_t first) {
    AllToAllOptions options;
    options.parallel.ep_size = size;
    options.parallel.ep_rank = r;
    options.parallel.placement = setup.placement;
    options.max_tokens_per_rank = 16;
    options.gather = setup.gather;
    MoeProblem problem = c.problem;
    const auto ids = local_expert_ids(problem.num_experts, options.parallel).value();
    const auto map = make_expert_map(problem.num_experts, options.parallel).value();
    problem.num_local_experts = static_cast<std::int64_t>(ids.size());
    problem.max_tokens = 16 * size;
    problem.num_threads = 1;
    SubsetSource source(c.weights.view(), ids);
    const ExpertsBackend* row = choose_experts(problem, setup.backend).value();
    std::shared_ptr<Communicator> comm = std::move(ranks[static_cast<std::size_t>(r)]);
    auto kernel = ModularKernel::create(
        problem, make_all_to_all_prepare_finalize(problem, comm, options).value(),
        row->create(problem, source).value(), {.max_tokens = 16});
    ASSERT_TRUE(kernel.ok()) << kernel.status().message();
    const std::int64_t n = counts[static_cast<std::size_t>(r)];
    const std::int64_t k = problem.top_k;
    const std::int64_t width = dtype_bits(c.hidden_states.dtype()) / 8;
    ModularKernel::Args a;
    a.hidden_states = ConstTensorView(c.hidden_states.data() + first * hidden * width,
                                      c.hidden_states.dtype(), Shape{n, hidden});
    a.topk_ids = ConstTensorView(c.routing.ids.data() + first * k * 4, DType::kI32, Shape{n, k});
    a.topk_weights =
        ConstTensorView(c.routing.weights.data() + first * k * 4, DType::kF32, Shape{n, k});
    a.expert_map = map;
    a.output = TensorView(output.data() + first * hidden * 4, DType::kF32, Shape{n, hidden});
    for (int repeat = 0; repeat < 2; ++repeat) {
      test::poison(kernel->workspace_for_test().data(), kernel->workspace_bytes());
      const Status status = kernel->run(a);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    EXPECT_TRUE(kernel->prepare_finalize().output_is_reduced());
  };
  std::vector<std::thread> threads;
  std::int64_t first = 0;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back(body, r, first);
    first += counts[static_cast<std::size_t>(r)];
  }
  for (std::thread& t : threads) t.join();
  return output;
}

// Uneven tokens, empty ranks, ranks without experts, slots without an expert.
const std::vector<std::vector<std::int64_t>> kCounts = {
    {7}, {5, 0}, {0, 9}, {1, 6, 3}, {4, 0, 16, 2}, {3, 3, 0, 1, 5, 2, 0, 4}};

TEST(AllToAll, EqualsOneRankForEveryPlacementAndTransport) {
  for (const bool gather : {false, true}) {
    for (const auto placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
      for (const char* quant : {"f32", "bf16", "fp8-block"}) {
        for (std::size_t i = 0; i < kCounts.size(); ++i) {
          SCOPED_TRACE(std::string(quant) + (gather ? " gather " : " all-to-all ") +
                       std::string(expert_placement_name(placement)) + " case " +
                       std::to_string(i));
          std::int64_t tokens = 0;
          for (const std::int64_t n : kCounts[i]) tokens += n;
          const StandardCase c =
              test::make_case(100 + i, test::small_problem(quant), tokens, DType::kBF16, 0.1);
          const std::string backend(choose_experts(c.problem).value()->name);
          const Tensor want = test::run_standard(*test::make_backend(backend, c), c);
          const Tensor got = run_ranks(c, kCounts[i], {placement, gather, backend});
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
  MoeProblem problem = test::small_problem("bf16");
  problem.top_k = 1;
  const StandardCase c = test::make_case(7, problem, 22, DType::kBF16);
  const std::string backend(choose_experts(c.problem).value()->name);
  const Tensor want = test::run_standard(*test::make_backend(backend, c), c);
  for (const bool gather : {false, true}) {
    const Tensor got = run_ranks(c, {4, 0, 16, 2}, {ExpertPlacement::kLinear, gather, backend});
    std::string why;
    EXPECT_TRUE(test::same_bits(got.view(), want.view(), &why)) << why;
  }
}

TEST(AllToAll, RefusesByName) {
  using test::expect_refusal;
  const std::shared_ptr<Communicator> self = make_self_communicator();
  MoeProblem problem = test::small_problem("bf16");
  problem.max_tokens = 4;
  AllToAllOptions options;
  options.max_tokens_per_rank = 4;
  const auto make = [&] {
    return make_all_to_all_prepare_finalize(problem, self, options).status();
  };
  EXPECT_TRUE(make().ok());
  options.max_tokens_per_rank = 0;
  expect_refusal(make(), StatusCode::kInvalidArgument, {"max_tokens_per_rank: got 0"});
  options.max_tokens_per_rank = 4;
  options.parallel.ep_size = 2;
  expect_refusal(make(), StatusCode::kInvalidArgument, {"parallel", "rank 0 of 1"});
  expect_refusal(make_all_to_all_prepare_finalize(problem, nullptr, options).status(),
                 StatusCode::kInvalidArgument, {"communicator"});
  options.parallel.ep_size = 1;
  problem.format = ActivationFormat::kBatched;
  expect_refusal(make(), StatusCode::kUnsupported, {"format"});
}

}  // namespace
}  // namespace moesaic
