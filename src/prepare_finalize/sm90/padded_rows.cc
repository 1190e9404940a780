#include "prepare_finalize/sm90/padded_rows.h"

#include <new>
#include <utility>

#include "core/checked.h"
#include "core/refusal.h"
#include "cuda/device_memory.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/device_rows.h"
#include "prepare_finalize/sm90/fit_rows.h"

namespace moesaic::cuda {

struct PaddedRows::Impl {
  std::unique_ptr<PrepareAndFinalize> inner;
  std::int64_t hidden = 0, carried = 0;  // of the caller's rows, of those that travel
  std::int64_t top_k = 1, max_tokens = 0;
  Device device = Device::cpu();
  DType row = DType::kBF16;
  Allocation sent;     // [max_tokens, carried]
  Allocation arrived;  // [M', hidden]
  Allocation results;  // [M' or M' * k, hidden], of the experts
  Allocation sum;      // [max_tokens, carried] F32 or narrower

  // Of the call between prepare and finalize.
  std::int64_t tokens = 0;
  TensorView inner_results;

  Result<Prepared> prepare(const PrepareArgs& args);
  Status finalize(const FinalizeArgs& args) const;
  // Rows of `hidden` columns with zeros behind them, or the front of rows that have more.
  Status pad(const char* what, void* to, const void* from, DType dtype, std::int64_t rows,
             void* stream) const {
    return fit(what, {from, to, rows, hidden, carried, dtype_bits(dtype) / 8}, stream);
  }
  Status trim(const char* what, void* to, const void* from, DType dtype, std::int64_t rows,
              void* stream) const {
    return fit(what, {from, to, rows, carried, hidden, dtype_bits(dtype) / 8}, stream);
  }
  static Status fit(const char* what, const FitRowsParams& params, void* stream) {
    return check_call(what, launch_fit_rows(params, stream));
  }
};

PaddedRows::PaddedRows(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PaddedRows::~PaddedRows() {
  const DeviceScope scope(impl_->device.index());
  impl_.reset();
}

Result<std::unique_ptr<PaddedRows>> PaddedRows::around(std::unique_ptr<PrepareAndFinalize> inner,
                                                       const MoeProblem& problem,
                                                       std::int64_t max_tokens,
                                                       std::int64_t rows_for_a_token) {
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl());
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the transport");
  impl->inner = std::move(inner);
  impl->hidden = problem.hidden_size;
  impl->carried = carried_problem(problem).hidden_size;
  impl->top_k = problem.top_k;
  impl->max_tokens = max_tokens;
  impl->device = problem.device;
  impl->row = row_dtype(problem);
  const DeviceScope scope(problem.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  const std::int64_t all = impl->inner->max_dispatched_tokens(max_tokens), hidden = impl->hidden;
  const std::int64_t element = dtype_bits(impl->row) / 8;
  MOESAIC_RETURN_IF_ERROR(impl->sent.reserve("padded rows", max_tokens * impl->carried * element));
  MOESAIC_RETURN_IF_ERROR(impl->arrived.reserve("arrived rows", all * hidden * element));
  // F32 or narrower.
  MOESAIC_RETURN_IF_ERROR(
      impl->results.reserve("results for other ranks", all * rows_for_a_token * hidden * 4));
  MOESAIC_RETURN_IF_ERROR(impl->sum.reserve("padded sums", max_tokens * impl->carried * 4));
  std::unique_ptr<PaddedRows> made(new (std::nothrow) PaddedRows(std::move(impl)));
  if (!made) return Status(StatusCode::kOutOfMemory, "cannot allocate the transport");
  return made;
}

std::string_view PaddedRows::name() const { return impl_->inner->name(); }
Status PaddedRows::attach(const Experts& experts) { return impl_->inner->attach(experts); }
std::int64_t PaddedRows::max_dispatched_tokens(std::int64_t tokens) const {
  return impl_->inner->max_dispatched_tokens(tokens);
}
Result<std::int64_t> PaddedRows::workspace_size(std::int64_t tokens) const {
  return impl_->inner->workspace_size(tokens);
}
Status PaddedRows::withdraw(const Status& reason, bool prepared,
                            std::span<std::byte> workspace) const {
  return impl_->inner->withdraw(reason, prepared, workspace);
}

Result<Prepared> PaddedRows::prepare(const PrepareArgs& args) const {
  // Whatever it is that fails: the others learn of it instead of waiting.
  Result<Prepared> prepared = impl_->prepare(args);
  return prepared.ok() ? std::move(prepared) : withdraw(prepared.status(), /*prepared=*/false, {});
}

Result<Prepared> PaddedRows::Impl::prepare(const PrepareArgs& args) {
  MOESAIC_RETURN_IF_ERROR(
      check_device_rows({max_tokens, hidden, top_k, device, row, dtype_bits(row) / 8}, args));
  tokens = args.hidden_states.dim(0);
  const DeviceScope scope(device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  void* const stream = args.stream.handle;
  MOESAIC_RETURN_IF_ERROR(
      pad("dispatch: pad", sent.as<void>(), args.hidden_states.data, row, tokens, stream));
  PrepareArgs padded = args;
  padded.hidden_states = {sent.as<std::byte>(), row, Shape{tokens, carried}, device};
  MOESAIC_ASSIGN_OR_RETURN(Prepared p, inner->prepare(padded));
  inner_results = p.expert_output;
  const std::int64_t rows = p.hidden_states.dim(0);
  MOESAIC_RETURN_IF_ERROR(
      trim("dispatch: trim", arrived.as<void>(), p.hidden_states.data, row, rows, stream));
  p.hidden_states = {arrived.as<std::byte>(), row, Shape{rows, hidden}, device};
  p.expert_output = {results.as<std::byte>(), p.expert_output.dtype,
                     Shape{p.expert_output.dim(0), hidden}, device};
  return p;
}

Status PaddedRows::finalize(const FinalizeArgs& args) const {
  const Status status = impl_->finalize(args);
  return status.ok() ? status : withdraw(status, /*prepared=*/true, {});
}

Status PaddedRows::Impl::finalize(const FinalizeArgs& args) const {
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("output", args.output.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", args.output, {tokens, hidden}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", args.output));
  MOESAIC_RETURN_IF_ERROR(expect_device("output", args.output, device));
  const DeviceScope scope(device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  void* const stream = args.stream.handle;
  const TensorView& to = inner_results;
  MOESAIC_RETURN_IF_ERROR(
      pad("combine: pad", to.data, results.as<void>(), to.dtype, to.dim(0), stream));
  FinalizeArgs padded = args;
  padded.expert_output = to;
  padded.output = {sum.as<std::byte>(), args.output.dtype, Shape{tokens, carried}, device};
  MOESAIC_RETURN_IF_ERROR(inner->finalize(padded));
  return trim("combine: trim", args.output.data, sum.as<void>(), args.output.dtype, tokens, stream);
}

std::int64_t PaddedRows::bytes() const {
  const Impl& m = *impl_;
  return m.sent.bytes() + m.arrived.bytes() + m.results.bytes() + m.sum.bytes();
}

}  // namespace moesaic::cuda
