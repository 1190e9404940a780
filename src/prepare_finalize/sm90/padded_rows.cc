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
  Impl& m = *impl_;
  const Status bad = check_device_rows({m.max_tokens, m.hidden, m.top_k, m.device, m.row}, args);
  if (!bad.ok()) return withdraw(bad, /*prepared=*/false, {});
  m.tokens = args.hidden_states.dim(0);
  const DeviceScope scope(m.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  void* const stream = args.stream.handle;
  MOESAIC_RETURN_IF_ERROR(
      m.pad("dispatch: pad", m.sent.as<void>(), args.hidden_states.data, m.row, m.tokens, stream));
  PrepareArgs carried = args;
  carried.hidden_states = {m.sent.as<std::byte>(), m.row, Shape{m.tokens, m.carried}, m.device};
  MOESAIC_ASSIGN_OR_RETURN(Prepared p, m.inner->prepare(carried));
  m.inner_results = p.expert_output;
  const std::int64_t rows = p.hidden_states.dim(0);
  MOESAIC_RETURN_IF_ERROR(
      m.trim("dispatch: trim", m.arrived.as<void>(), p.hidden_states.data, m.row, rows, stream));
  p.hidden_states = {m.arrived.as<std::byte>(), m.row, Shape{rows, m.hidden}, m.device};
  p.expert_output = {m.results.as<std::byte>(), p.expert_output.dtype,
                     Shape{p.expert_output.dim(0), m.hidden}, m.device};
  return p;
}

Status PaddedRows::finalize(const FinalizeArgs& args) const {
  const Impl& m = *impl_;
  const auto check = [&]() -> Status {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("output", args.output.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_shape("output", args.output, {m.tokens, m.hidden}));
    MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", args.output));
    return expect_device("output", args.output, m.device);
  };
  if (const Status bad = check(); !bad.ok()) return withdraw(bad, /*prepared=*/true, {});
  const DeviceScope scope(m.device.index());
  MOESAIC_RETURN_IF_ERROR(scope.status());
  void* const stream = args.stream.handle;
  const TensorView& to = m.inner_results;
  MOESAIC_RETURN_IF_ERROR(
      m.pad("combine: pad", to.data, m.results.as<void>(), to.dtype, to.dim(0), stream));
  FinalizeArgs carried = args;
  carried.expert_output = to;
  carried.output = {m.sum.as<std::byte>(), args.output.dtype, Shape{m.tokens, m.carried}, m.device};
  MOESAIC_RETURN_IF_ERROR(m.inner->finalize(carried));
  return m.trim("combine: trim", args.output.data, m.sum.as<void>(), args.output.dtype, m.tokens,
                stream);
}

std::int64_t PaddedRows::bytes() const {
  const Impl& m = *impl_;
  return m.sent.bytes() + m.arrived.bytes() + m.results.bytes() + m.sum.bytes();
}

}  // namespace moesaic::cuda
