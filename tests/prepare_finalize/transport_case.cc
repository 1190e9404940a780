#include "prepare_finalize/transport_case.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "support/random.h"

namespace moesaic::test {
namespace {

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

void run_rank(const StandardCase& c, const TransportSetup& setup, int size, std::int64_t first,
              std::shared_ptr<Communicator> comm, Tensor& output, RankRun& result) {
  const int r = comm->rank();
  AllToAllOptions options;
  options.parallel.ep_size = size;
  options.parallel.ep_rank = r;
  options.parallel.placement = setup.placement;
  options.max_tokens_per_rank = setup.max_tokens;
  options.gather = setup.transport == Transport::kGather;
  options.quantize_before_dispatch = setup.quantize_before_dispatch;
  options.combine_dtype = setup.combine_dtype;
  MoeProblem problem = c.problem;
  const auto ids = local_expert_ids(problem.num_experts, options.parallel).value();
  const auto map = make_expert_map(problem.num_experts, options.parallel).value();
  const bool batched = setup.transport == Transport::kBatched;
  problem.num_local_experts = static_cast<std::int64_t>(ids.size());
  problem.max_tokens = setup.max_tokens * size;
  problem.format = batched ? ActivationFormat::kBatched : ActivationFormat::kStandard;
  problem.num_threads = 1;
  SubsetSource source(c.weights.view(), ids);
  const ExpertsBackend* row = choose_experts(problem, setup.backend).value();
  auto pf = batched ? make_batched_all_to_all_prepare_finalize(problem, comm, options)
                    : make_all_to_all_prepare_finalize(problem, comm, options);
  ASSERT_TRUE(pf.ok()) << pf.status().message();
  auto kernel = ModularKernel::create(
      problem, std::move(pf).value(), row->create(problem, source).value(),
      {.max_tokens = setup.max_tokens, .max_tokens_per_expert = batched ? problem.max_tokens : 0});
  ASSERT_TRUE(kernel.ok()) << kernel.status().message();
  EXPECT_TRUE(kernel->prepare_finalize().output_is_reduced());

  const std::int64_t hidden = problem.hidden_size;
  const std::int64_t k = problem.top_k;
  const std::int64_t width = dtype_bits(c.hidden_states.dtype()) / 8;
  ModularKernel::Args good;
  good.hidden_states = ConstTensorView(c.hidden_states.data() + first * hidden * width,
                                       c.hidden_states.dtype(), Shape{result.rows, hidden});
  good.topk_ids =
      ConstTensorView(c.routing.ids.data() + first * k * 4, DType::kI32, Shape{result.rows, k});
  good.topk_weights =
      ConstTensorView(c.routing.weights.data() + first * k * 4, DType::kF32, Shape{result.rows, k});
  good.expert_map = map;
  good.output =
      TensorView(output.data() + first * hidden * 4, DType::kF32, Shape{result.rows, hidden});
  for (int repeat = 0; repeat < setup.repeats; ++repeat) {
    poison(kernel->workspace_for_test().data(), kernel->workspace_bytes());
    poison(good.output);
    const std::int64_t before = comm->bytes_sent();
    ModularKernel::Args args = good;
    if (setup.spoil && repeat == 0) setup.spoil(r, args);
    result.calls.push_back(kernel->run(args));
    result.bytes_sent = comm->bytes_sent() - before;
  }
}

}  // namespace

const char* transport_name(Transport transport) {
  switch (transport) {
    case Transport::kAllToAll:
      return "all_to_all";
    case Transport::kGather:
      return "all_gather_reduce_scatter";
    case Transport::kBatched:
      return "all_to_all_batched";
  }
  return "?";
}

TransportRun run_transport(const StandardCase& c, const std::vector<std::int64_t>& counts,
                           const TransportSetup& setup) {
  const int size = static_cast<int>(counts.size());
  TransportRun run;
  run.output = Tensor::uninitialized(DType::kF32, c.hidden_states.shape()).value();
  run.ranks.resize(counts.size());
  auto ranks = make_in_process_communicators(size, {.timeout_ms = 20'000}).value();
  std::vector<std::thread> threads;
  std::int64_t first = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    run.ranks[r].rows = counts[r];
    threads.emplace_back([&, r, first, comm = std::shared_ptr<Communicator>(std::move(ranks[r]))] {
      run_rank(c, setup, size, first, comm, run.output, run.ranks[r]);
    });
    first += counts[r];
  }
  for (std::thread& t : threads) t.join();
  return run;
}

}  // namespace moesaic::test
