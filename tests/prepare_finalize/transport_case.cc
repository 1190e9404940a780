#include "prepare_finalize/transport_case.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "support/hang_guard.h"
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

void run_rank(const StandardCase& c, const TransportSetup& setup, std::int64_t first,
              const std::shared_ptr<Communicator>& comm, Tensor& output, RankRun& result) {
  const auto made = RankKernel::create(c, setup, comm);
  ASSERT_TRUE(made.ok()) << made.status().message();
  RankKernel& rank = **made;
  EXPECT_TRUE(rank.kernel().prepare_finalize().output_is_reduced());
  for (int repeat = 0; repeat < setup.repeats; ++repeat) {
    rank.poison_workspace();
    ModularKernel::Args args = rank.args(c, first, result.rows, output);
    poison(args.output);
    const std::int64_t before = comm->bytes_sent();
    if (setup.spoil && repeat == 0) setup.spoil(comm->rank(), args);
    result.calls.push_back(rank.kernel().run(args));
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

Result<std::unique_ptr<RankKernel>> RankKernel::create(const StandardCase& c,
                                                       const TransportSetup& setup,
                                                       std::shared_ptr<Communicator> communicator) {
  const int size = communicator->size();
  AllToAllOptions options;
  options.parallel.ep_size = size;
  options.parallel.ep_rank = communicator->rank();
  options.parallel.placement = setup.placement;
  options.max_tokens_per_rank = setup.max_tokens;
  options.gather = setup.transport == Transport::kGather;
  options.quantize_before_dispatch = setup.quantize_before_dispatch;
  options.combine_dtype = setup.combine_dtype;
  MoeProblem problem = c.problem;
  auto rank = std::make_unique<RankKernel>();
  MOESAIC_ASSIGN_OR_RETURN(std::vector<std::int64_t> ids,
                           local_expert_ids(problem.num_experts, options.parallel));
  MOESAIC_ASSIGN_OR_RETURN(rank->map_, make_expert_map(problem.num_experts, options.parallel));
  const bool batched = setup.transport == Transport::kBatched;
  problem.num_local_experts = static_cast<std::int64_t>(ids.size());
  problem.max_tokens = setup.max_tokens * size;
  problem.format = batched ? ActivationFormat::kBatched : ActivationFormat::kStandard;
  problem.num_threads = 1;
  SubsetSource source(c.weights.view(), std::move(ids));
  MOESAIC_ASSIGN_OR_RETURN(const ExpertsBackend* row, choose_experts(problem, setup.backend));
  MOESAIC_ASSIGN_OR_RETURN(
      auto pf, batched ? make_batched_all_to_all_prepare_finalize(problem, communicator, options)
                       : make_all_to_all_prepare_finalize(problem, communicator, options));
  MOESAIC_ASSIGN_OR_RETURN(auto experts, row->create(problem, source));
  MOESAIC_ASSIGN_OR_RETURN(
      ModularKernel kernel,
      ModularKernel::create(problem, std::move(pf), std::move(experts),
                            {.max_tokens = setup.max_tokens,
                             .max_tokens_per_expert = batched ? problem.max_tokens : 0,
                             .calls_in_flight = setup.calls_in_flight,
                             .own_workspace = setup.calls_in_flight > 1}));
  if (setup.calls_in_flight == 1) {
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, kernel.workspace_size(setup.max_tokens));
    MOESAIC_ASSIGN_OR_RETURN(Tensor workspace, Tensor::uninitialized(DType::kU8, {bytes}));
    rank->workspace_ = std::make_unique<Tensor>(std::move(workspace));
  }
  rank->kernel_ = std::make_unique<ModularKernel>(std::move(kernel));
  return rank;
}

void RankKernel::poison_workspace() {
  if (workspace_) poison(workspace_->data(), workspace_->bytes());
}

ModularKernel::Args RankKernel::args(const StandardCase& c, std::int64_t first, std::int64_t rows,
                                     Tensor& output) const {
  const std::int64_t hidden = c.problem.hidden_size;
  const std::int64_t k = c.problem.top_k;
  const std::int64_t width = dtype_bits(c.hidden_states.dtype()) / 8;
  ModularKernel::Args a;
  a.hidden_states = ConstTensorView(c.hidden_states.data() + first * hidden * width,
                                    c.hidden_states.dtype(), Shape{rows, hidden});
  a.topk_ids = ConstTensorView(c.routing.ids.data() + first * k * 4, DType::kI32, Shape{rows, k});
  a.topk_weights =
      ConstTensorView(c.routing.weights.data() + first * k * 4, DType::kF32, Shape{rows, k});
  a.expert_map = map_;
  a.output = TensorView(output.data() + first * hidden * 4, DType::kF32, Shape{rows, hidden});
  if (workspace_) a.workspace = {workspace_->data(), static_cast<std::size_t>(workspace_->bytes())};
  return a;
}

TransportRun run_transport(const StandardCase& c, const std::vector<std::int64_t>& counts,
                           const TransportSetup& setup) {
  const int size = static_cast<int>(counts.size());
  TransportRun run;
  run.output = Tensor::uninitialized(DType::kF32, c.hidden_states.shape()).value();
  run.ranks.resize(counts.size());
  auto ranks = make_in_process_communicators(size, {.timeout_ms = kHangGuardMs}).value();
  std::vector<std::thread> threads;
  std::int64_t first = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    run.ranks[r].rows = counts[r];
    threads.emplace_back([&, r, first, comm = std::shared_ptr<Communicator>(std::move(ranks[r]))] {
      run_rank(c, setup, first, comm, run.output, run.ranks[r]);
    });
    first += counts[r];
  }
  for (std::thread& t : threads) t.join();
  return run;
}

}  // namespace moesaic::test
