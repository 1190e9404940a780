#include "prepare_finalize/sm90/slabbed_rows.h"

#include <fmt/format.h>

#include <new>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "moesaic/parallel.h"
#include "prepare_finalize/rank_transport.h"
#include "prepare_finalize/sm90/all_to_all.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/padded_rows.h"
#include "prepare_finalize/sm90/slab_filler.h"

namespace moesaic::cuda {

struct SlabbedRows::Impl {
  Impl(const MoeProblem& problem, const DeviceTraits& traits)
      : p(problem), filler(problem, row_dtype(problem), traits) {}
  std::unique_ptr<PrepareAndFinalize> inner;
  MoeProblem p;
  SlabFiller filler;
  DType result_dtype = DType::kF32;
  Allocation expert_map;  // [num_experts]
  Allocation memory;      // of `rows`, for as many as may arrive
  Allocation results;     // [E_l, T, H] of result_dtype
  SlabMemory rows;
  std::int64_t inner_bytes = 0;

  Status allocate(const std::vector<std::int32_t>& map);

  // Of the call between prepare and finalize.
  TensorView answers;  // [M' k, H] of the inner transport
};

SlabbedRows::SlabbedRows(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SlabbedRows::~SlabbedRows() {
  const DeviceScope scope(impl_->p.device.index());
  impl_.reset();
}

Status SlabbedRows::Impl::allocate(const std::vector<std::int32_t>& map) {
  const std::int64_t most = inner->max_dispatched_tokens(p.max_tokens);
  Arena measure = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(rows, filler.carve(measure, most));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes,
                           contiguous_bytes(result_dtype, filler.shape()));
  MOESAIC_RETURN_IF_ERROR(memory.reserve("slabs", measure.used()));
  MOESAIC_RETURN_IF_ERROR(results.reserve("results in slabs", bytes));
  MOESAIC_RETURN_IF_ERROR(
      upload("experts of this rank", map.data(), std::ssize(map) * 4, expert_map));
  Arena arena({memory.as<std::byte>(), static_cast<std::size_t>(measure.used())});
  MOESAIC_ASSIGN_OR_RETURN(rows, filler.carve(arena, most));
  return {};
}

Result<std::unique_ptr<SlabbedRows>> SlabbedRows::create(const MoeProblem& problem,
                                                         std::shared_ptr<Communicator> communicator,
                                                         const AllToAllOptions& options,
                                                         DType results) {
  MOESAIC_RETURN_IF_ERROR(
      prepare_finalize::RankTransport::check_options(communicator.get(), options));
  MOESAIC_RETURN_IF_ERROR(
      prepare_finalize::RankTransport::check_slabs(problem, options, communicator->size()));
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int32_t> map,
                           make_expert_map(problem.num_experts, options.parallel));
  const DeviceScope scope(problem.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  MOESAIC_ASSIGN_OR_RETURN(const DeviceTraits traits, current_device_traits());
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl(problem, traits));
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the transport");
  impl->result_dtype = results;

  AllToAllOptions plain = options;
  plain.quantize_before_dispatch = false;
  MoeProblem rows = problem;
  rows.format = ActivationFormat::kStandard;
  const CudaAllToAll::Answer answer{CudaAllToAll::Answer::Form::kSlots,
                                    options.combine_dtype == DType::kBF16 ? DType::kBF16 : results,
                                    /*weighted=*/false};
  const MoeProblem carried = carried_problem(rows);
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<CudaAllToAll> messages,
                           CudaAllToAll::create(carried, std::move(communicator), plain, answer));
  impl->inner_bytes = messages->bytes();
  impl->inner = std::move(messages);
  if (carried.hidden_size != problem.hidden_size) {
    MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<PaddedRows> padded,
                             PaddedRows::around(std::move(impl->inner), rows,
                                                options.max_tokens_per_rank, problem.top_k));
    impl->inner_bytes += padded->bytes();
    impl->inner = std::move(padded);
  }
  MOESAIC_RETURN_IF_ERROR(impl->allocate(map));
  std::unique_ptr<SlabbedRows> made(new (std::nothrow) SlabbedRows(std::move(impl)));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the transport");
  return made;
}

Status SlabbedRows::attach(const Experts& experts) {
  const TopKWeightAndReduce r = experts.reduction();
  if (r == TopKWeightAndReduce::kNaiveBatched || r == TopKWeightAndReduce::kDelegate) return {};
  return unsupported(
      fmt::format("prepare_finalize {}: experts {} do not leave a batched or delegated reduction",
                  name(), experts.name()));
}

std::int64_t SlabbedRows::max_dispatched_tokens(std::int64_t) const { return impl_->p.max_tokens; }
Result<std::int64_t> SlabbedRows::workspace_size(std::int64_t tokens) const {
  return impl_->inner->workspace_size(tokens);
}
Status SlabbedRows::withdraw(const Status& reason, bool prepared,
                             std::span<std::byte> workspace) const {
  return impl_->inner->withdraw(reason, prepared, workspace);
}

Result<Prepared> SlabbedRows::prepare(const PrepareArgs& args) const {
  Impl& m = *impl_;
  MOESAIC_ASSIGN_OR_RETURN(const Prepared arrived, m.inner->prepare(args));
  m.answers = arrived.expert_output;
  const DeviceScope scope(m.p.device.index());
  Status status = scope.status();
  if (status.ok()) {
    status = m.filler.fill({arrived.hidden_states, arrived.topk_ids.as<std::int32_t>(),
                            arrived.topk_weights.as<float>(), m.expert_map.as<std::int32_t>()},
                           m.rows, args.stream.handle);
  }
  if (!status.ok()) return withdraw(status, /*prepared=*/true, {});
  const std::int64_t count = arrived.hidden_states.dim(0);
  // Without rows nothing is to be done, and the slabs have none.
  const Shape shape{m.p.num_local_experts, count == 0 ? 0 : m.p.max_tokens, m.p.hidden_size};
  Prepared p;
  p.hidden_states = ConstTensorView(m.rows.slabs, m.filler.dtype(), shape, m.p.device);
  p.expert_num_tokens = {m.rows.counts, static_cast<std::size_t>(m.p.num_local_experts)};
  p.expert_output = TensorView(m.results.as<std::byte>(), m.result_dtype, shape, m.p.device);
  return p;
}

Status SlabbedRows::finalize(const FinalizeArgs& args) const {
  const Impl& m = *impl_;
  const DeviceScope scope(m.p.device.index());
  SlotRowsParams p;
  p.slabs = m.results.as<void>();
  p.slabs_dtype = m.result_dtype;
  p.slot_rows = m.rows.slot_rows;
  p.slots = m.answers.dim(0);
  p.columns = m.p.hidden_size;
  p.to = m.answers.data;
  p.dtype = m.answers.dtype;
  Status status = scope.status();
  if (status.ok()) status = check_call("combine: slabs", launch_slot_rows(p, args.stream.handle));
  if (!status.ok()) return withdraw(status, /*prepared=*/true, {});
  FinalizeArgs inner = args;
  inner.expert_output = m.answers;
  return m.inner->finalize(inner);
}

std::int64_t SlabbedRows::bytes() const {
  const Impl& m = *impl_;
  return m.inner_bytes + m.expert_map.bytes() + m.memory.bytes() + m.results.bytes();
}

Result<std::unique_ptr<PrepareAndFinalize>> make_sm90_batched_all_to_all(
    const MoeProblem& problem, std::shared_ptr<Communicator> communicator,
    const AllToAllOptions& options) {
  MOESAIC_RETURN_IF_ERROR(sm90_slabs_can_travel(problem));
  MOESAIC_RETURN_IF_ERROR(check_device(problem.device));
  // What the experts leave, asked of the problem that is alike on all ranks.
  MoeProblem all = problem;
  all.num_local_experts = all.num_experts;
  const DType results = choose_experts(all, "cuda_sm90").ok() ? DType::kBF16 : DType::kF32;
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<SlabbedRows> made,
                           SlabbedRows::create(problem, std::move(communicator), options, results));
  return std::unique_ptr<PrepareAndFinalize>(std::move(made));
}

}  // namespace moesaic::cuda
