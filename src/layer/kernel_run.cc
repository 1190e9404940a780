// A call of a ModularKernel, at once or in steps.
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "core/arena.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "cpu/tiers.h"
#include "layer/kernel_impl.h"

namespace moesaic {

Result<int> ModularKernel::Impl::take_slot() const {
  for (int slot = 0; slot < options.calls_in_flight; ++slot) {
    const std::uint32_t bit = 1U << slot;
    if ((slots_taken & bit) != 0) continue;
    slots_taken |= bit;
    ++calls;
    return slot;
  }
  return Status(StatusCode::kLimitExceeded,
                fmt::format("calls in flight: got one more than {}, need calls_in_flight {} or a "
                            "call that is finished",
                            options.calls_in_flight, options.calls_in_flight + 1));
}

void ModularKernel::Impl::give_slot(int slot) const {
  slots_taken &= ~(1U << slot);
  --calls;
}

Result<ModularKernel::Impl::Pieces> ModularKernel::Impl::lay_out(const Args& a, int slot) const {
  if (MOESAIC_FAULT(kernel_calls_share_a_workspace)) slot = 0;
  MOESAIC_ASSIGN_OR_RETURN(const std::span<std::byte> bytes, workspace_of(a, slot));
  Arena arena(bytes);
  return carve(arena, a.hidden_states.dim(0));
}

PrepareArgs ModularKernel::Impl::prepare_args(const Args& a, const Pieces& pieces) const {
  return {a.hidden_states, a.topk_weights, a.topk_ids, a.expert_map, pieces.prepare, a.stream};
}

FinalizeArgs ModularKernel::Impl::finalize_args(const Args& a, const Pieces& pieces,
                                                const TensorView& expert_output) const {
  return {a.output,
          expert_output,
          a.topk_weights,
          a.topk_ids,
          a.expert_map,
          experts->reduction(),
          problem.apply_router_weight_on_input,
          pieces.prepare,
          a.stream};
}

Status ModularKernel::Impl::run_experts(const Args& a, const Prepared& prepared,
                                        const Pieces& pieces,
                                        const TensorView& expert_output) const {
  ExpertsArgs e;
  e.hidden_states = prepared.hidden_states;
  e.hidden_scale = prepared.hidden_scale;
  if (problem.format == ActivationFormat::kStandard) {
    e.topk_ids = prepared.topk_ids.present() ? prepared.topk_ids : a.topk_ids;
    e.topk_weights = prepared.topk_weights.present() ? prepared.topk_weights : a.topk_weights;
    e.expert_map = a.expert_map;
  }
  e.expert_num_tokens = prepared.expert_num_tokens;
  e.workspace = pieces.experts;
  e.output = expert_output;
  e.inplace = options.inplace;
  e.numerics = a.numerics;
  e.a1_scale = a.a1_scale;
  e.a2_scale = a.a2_scale;
  e.stream = a.stream;
  return experts->run(e);
}

Result<TensorView> ModularKernel::Impl::compute(const Args& a, const Prepared& prepared,
                                                const Pieces& pieces) const {
  // Nothing dispatched: the experts have no work, but finalize may be a collective and runs.
  std::int64_t work = prepared.hidden_states.dim(0);
  if (problem.format == ActivationFormat::kBatched && problem.device.is_cuda()) {
    work = prepared.hidden_states.dim(1);  // counts are the device's
  } else if (problem.format == ActivationFormat::kBatched) {
    work = 0;
    for (const std::int32_t count : prepared.expert_num_tokens) work += count;
  }
  std::fill(a.numerics.begin(), a.numerics.end(), RowNumerics());
  TensorView expert_output(nullptr, a.hidden_states.dtype, Shape{0, problem.hidden_size});
  if (work == 0) return expert_output;
  if (pf->owns_expert_output()) {
    expert_output = prepared.expert_output;
  } else if (writes_output_directly()) {
    expert_output = a.output;
  } else {
    MOESAIC_ASSIGN_OR_RETURN(const Shape shape, expert_output_shape(prepared.hidden_states.dim(0)));
    expert_output = TensorView(pieces.expert_output, DType::kF32, shape, problem.device);
  }
  if (!MOESAIC_FAULT(kernel_stale_output)) {
    MOESAIC_RETURN_IF_ERROR(run_experts(a, prepared, pieces, expert_output));
  }
  return expert_output;
}

Status ModularKernel::run(const Args& args) const {
  const cpu::ScopedIeeeMode ieee;
  const Impl& m = *impl_;
  // Of a transport one call at a time, whoever brings the memory.
  const bool alone = args.workspace.empty() || !m.pf->keeps_rows();
  std::unique_lock<std::mutex> lock(m.mutex, std::defer_lock);
  if (alone) lock.lock();
  const Result<int> slot = alone ? m.take_slot() : Result<int>(0);
  const Status bad = slot.ok() ? m.check(args) : slot.status();
  const Result<Impl::Pieces> pieces = bad.ok() ? m.lay_out(args, *slot) : bad;
  const auto run_in = [&](const Impl::Pieces& p) -> Status {
    MOESAIC_ASSIGN_OR_RETURN(const Prepared prepared, m.pf->prepare(m.prepare_args(args, p)));
    const Result<TensorView> output = m.compute(args, prepared, p);
    if (!output.ok()) return m.pf->withdraw(output.status(), true, p.prepare);
    return m.pf->finalize(m.finalize_args(args, p, *output));
  };
  Status status = pieces.ok() ? run_in(*pieces) : m.pf->withdraw(pieces.status(), false, {});
  if (alone && slot.ok()) m.give_slot(*slot);
  return status;
}

Status ModularKernel::enqueue(Stream stream, const Args& args) const {
  if (!impl_->problem.device.is_cuda()) {
    return unsupported("enqueue: got a kernel on the CPU, need one on a GPU");
  }
  Args on_stream = args;
  on_stream.stream = stream;
  return run(on_stream);
}

// --- In steps ------------------------------------------------------------------------------------

struct ModularKernel::Call::State {
  const Impl& kernel;
  const Args args;
  int slot;
  Impl::Pieces pieces = {};
  std::unique_ptr<PrepareReceiver> rows = nullptr;      // rows are on their way to the experts
  std::unique_ptr<FinalizeReceiver> results = nullptr;  // results are on their way back
  Status failure = {};

  State(const Impl& m, const Args& a, int s) : kernel(m), args(a), slot(s) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    rows = nullptr;  // while the workspace is still this call's
    results = nullptr;
    give_slot();
  }
  void give_slot() {
    if (slot < 0) return;
    const std::lock_guard<std::mutex> lock(kernel.mutex);
    kernel.give_slot(std::exchange(slot, -1));
  }

  Status start() {
    const Result<Impl::Pieces> laid = kernel.lay_out(args, slot);
    if (!laid.ok()) return kernel.pf->withdraw(laid.status(), false, {});
    pieces = *laid;
    MOESAIC_ASSIGN_OR_RETURN(rows, kernel.pf->prepare_async(kernel.prepare_args(args, pieces)));
    return {};
  }
  Status run_experts() {
    MOESAIC_ASSIGN_OR_RETURN(const Prepared prepared, std::exchange(rows, nullptr)->receive());
    const Result<TensorView> output = kernel.compute(args, prepared, pieces);
    if (!output.ok()) return kernel.pf->withdraw(output.status(), true, pieces.prepare);
    MOESAIC_ASSIGN_OR_RETURN(
        results, kernel.pf->finalize_async(kernel.finalize_args(args, pieces, *output)));
    return {};
  }
};

Result<ModularKernel::Call> ModularKernel::start(const Args& args) const {
  const cpu::ScopedIeeeMode ieee;
  const Impl& m = *impl_;
  Result<int> slot = 0;
  {
    const std::lock_guard<std::mutex> lock(m.mutex);
    slot = m.take_slot();
  }
  const Status bad = slot.ok() ? m.check(args) : slot.status();
  std::unique_ptr<Call::State> state;
  if (slot.ok()) {
    state.reset(new (std::nothrow) Call::State(m, args, *slot));
    if (!state) {
      const std::lock_guard<std::mutex> lock(m.mutex);
      m.give_slot(*slot);
    }
  }
  if (!bad.ok() || !state) {
    return m.pf->withdraw(
        bad.ok() ? Status(StatusCode::kOutOfMemory, "cannot allocate a call") : bad, false, {});
  }
  MOESAIC_RETURN_IF_ERROR(state->start());
  return Call(std::move(state));
}

Status ModularKernel::Call::run_experts() {
  const cpu::ScopedIeeeMode ieee;
  State& s = *state_;
  if (!s.failure.ok()) return s.failure;
  if (!s.rows) return {StatusCode::kInvalidArgument, "run_experts: got a second one of this call"};
  return s.failure = s.run_experts();
}

Status ModularKernel::Call::finish() {
  const cpu::ScopedIeeeMode ieee;
  State& s = *state_;
  if (s.rows) MOESAIC_RETURN_IF_ERROR(run_experts());
  if (!s.failure.ok()) return s.failure;
  if (!s.results) return {StatusCode::kInvalidArgument, "finish: got a second one of this call"};
  s.failure = std::exchange(s.results, nullptr)->receive();
  if (!MOESAIC_FAULT(kernel_finished_calls_stay)) s.give_slot();
  return s.failure;
}

ModularKernel::Call::Call(std::unique_ptr<State> state) : state_(std::move(state)) {}
ModularKernel::Call::Call(Call&&) noexcept = default;
ModularKernel::Call& ModularKernel::Call::operator=(Call&&) noexcept = default;
ModularKernel::Call::~Call() = default;

}  // namespace moesaic
