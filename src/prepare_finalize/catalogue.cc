// The ordered list of prepare/finalize objects, with what each requires of the problem and of the
// ranks.
#include <fmt/format.h>

#include <array>
#include <string>

#include "core/refusal.h"
#include "moesaic/modular_kernel.h"
#include "prepare_finalize/predicates.h"
#include "prepare_finalize/sm90/catalogue_row.h"

namespace moesaic::prepare_finalize {
namespace {

// Ranks that have rows of their own, of a valid `parallel`: the size of its token group, which may
// be too many to list.
int ranks_with_rows(const ParallelConfig& parallel) {
  return parallel.is_sequence_parallel() ? parallel.flat_size()
                                         : parallel.flat_size() / parallel.engine_tp_size();
}

// One of the three below is asked by each row.
// Nothing moves: every rank has all rows (or there is one rank).
Status rows_are_here(std::string_view name, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(parallel.validate().with_context("parallel"));
  const int ranks = ranks_with_rows(parallel);
  if (ranks == 1) return {};
  return {StatusCode::kUnsupported,
          fmt::format("parallel: {} ranks have rows of their own, {} moves none", ranks, name)};
}

Status experts_are_spread(std::string_view name, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(parallel.validate().with_context("parallel"));
  if (parallel.use_all_to_all()) return {};
  return {StatusCode::kUnsupported,
          fmt::format("parallel: got ep size {}, dp size {}, sp size {}; {} needs experts spread "
                      "over ranks (ep > 1) that have rows of their own (dp > 1 or sp > 1)",
                      parallel.ep_size, parallel.dp_size, parallel.sp_size, name)};
}

Status local(const MoeProblem& problem, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(local_can_implement(problem));
  return rows_are_here("local", parallel);
}
Status batched(const MoeProblem& problem, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(batched_can_implement(problem));
  if (problem.device.is_cuda()) {
    MOESAIC_RETURN_IF_ERROR(cuda::sm90_batched_can_implement(problem));
  }
  return rows_are_here("batched_reference", parallel);
}
Status all_to_all(const MoeProblem& problem, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(standard_transport_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(experts_are_spread("all_to_all", parallel));
  return expect_cpu(problem.device);
}
Status gathers_rows(std::string_view name, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(parallel.validate().with_context("parallel"));
  if (ranks_with_rows(parallel) > 1) return {};
  return {StatusCode::kUnsupported,
          fmt::format("parallel: every rank has all rows, {} has nothing to gather", name)};
}
Status cuda_all_to_all(const MoeProblem& problem, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(cuda::sm90_transport_can_implement(problem));
  return experts_are_spread("cuda_all_to_all", parallel);
}
Status cuda_gather(const MoeProblem& problem, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(cuda::sm90_transport_can_implement(problem));
  return gathers_rows("cuda_all_gather_reduce_scatter", parallel);
}
Status slabs_have_room(const MoeProblem& problem, const ParallelConfig& parallel) {
  if (problem.max_tokens % parallel.ep_size == 0) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("max_tokens: got {} rows per slab, need a multiple of ep size {}",
                      problem.max_tokens, parallel.ep_size)};
}
Status all_to_all_batched(const MoeProblem& problem, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(batched_transport_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(experts_are_spread("all_to_all_batched", parallel));
  MOESAIC_RETURN_IF_ERROR(slabs_have_room(problem, parallel));
  return expect_cpu(problem.device);
}
Status cuda_all_to_all_batched(const MoeProblem& problem, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(cuda::sm90_slabs_can_travel(problem));
  MOESAIC_RETURN_IF_ERROR(experts_are_spread("cuda_all_to_all_batched", parallel));
  return slabs_have_room(problem, parallel);
}
Status gather(const MoeProblem& problem, const ParallelConfig& parallel) {
  MOESAIC_RETURN_IF_ERROR(standard_transport_can_implement(problem));
  MOESAIC_RETURN_IF_ERROR(gathers_rows("all_gather_reduce_scatter", parallel));
  return expect_cpu(problem.device);
}

// NOLINTBEGIN(performance-unnecessary-value-param): one signature for all rows
Result<std::unique_ptr<PrepareAndFinalize>> make_local(const MoeProblem& problem,
                                                       std::shared_ptr<Communicator>,
                                                       const AllToAllOptions&) {
  return make_local_prepare_finalize(problem);
}
Result<std::unique_ptr<PrepareAndFinalize>> make_batched(const MoeProblem& problem,
                                                         std::shared_ptr<Communicator>,
                                                         const AllToAllOptions&) {
  return make_batched_prepare_finalize(problem);
}
// NOLINTEND(performance-unnecessary-value-param)
using Make = decltype(make_all_to_all_prepare_finalize);
template <Make* kMake, bool kGather>
Result<std::unique_ptr<PrepareAndFinalize>> make_standard(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options) {
  AllToAllOptions chosen = options;
  chosen.gather = kGather;
  return kMake(problem, std::move(communicator), chosen);
}

constexpr auto kCatalogue = std::to_array<PrepareFinalizeBackend>({
    {"local", "no transport, standard format, rows stay where they are", &local, &make_local},
    {"batched_reference", "no transport, one slab of rows per local expert", &batched,
     &make_batched},
    {"cuda_all_to_all", "as all_to_all, rows in the memory of a Hopper GPU", &cuda_all_to_all,
     &make_standard<&cuda::make_sm90_all_to_all, false>},
    {"cuda_all_gather_reduce_scatter",
     "as all_gather_reduce_scatter, rows in the memory of a Hopper GPU", &cuda_gather,
     &make_standard<&cuda::make_sm90_all_to_all, true>},
    {"cuda_all_to_all_batched", "as all_to_all_batched, rows in the memory of a Hopper GPU",
     &cuda_all_to_all_batched, &cuda::make_sm90_batched_all_to_all},
    {"all_to_all", "each row once to every rank that owns one of its experts, one sum back",
     &all_to_all, &make_standard<&make_all_to_all_prepare_finalize, false>},
    {"all_gather_reduce_scatter", "every row to every rank, sums scattered back", &gather,
     &make_standard<&make_all_to_all_prepare_finalize, true>},
    {"all_to_all_batched", "low latency: each row into the slab of each of its experts",
     &all_to_all_batched, &make_batched_all_to_all_prepare_finalize},
});

}  // namespace

Status standard_transport_can_implement(const MoeProblem& problem) {
  if (problem.format == ActivationFormat::kStandard) return check_problem(problem);
  return {StatusCode::kUnsupported,
          "format: the experts want batched activations, this transport yields the standard "
          "format"};
}

Status batched_transport_can_implement(const MoeProblem& problem) {
  if (problem.format != ActivationFormat::kBatched) {
    return {StatusCode::kUnsupported,
            "format: the experts want the standard format, all_to_all_batched yields slabs"};
  }
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  if (problem.max_tokens >= 1) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("max_tokens: got {}, the batched format needs T >= 1", problem.max_tokens)};
}

}  // namespace moesaic::prepare_finalize

namespace moesaic {

std::span<const PrepareFinalizeBackend> prepare_finalize_catalogue() {
  return prepare_finalize::kCatalogue;
}

std::vector<CandidateReport> explain_prepare_finalize(const MoeProblem& problem,
                                                      const ParallelConfig& parallel) {
  std::vector<CandidateReport> reports;
  for (const PrepareFinalizeBackend& row : prepare_finalize_catalogue()) {
    const Status status = row.can_implement(problem, parallel);
    reports.push_back({"prepare_finalize", std::string(row.name), status.message(), status.ok()});
  }
  return reports;
}

}  // namespace moesaic
