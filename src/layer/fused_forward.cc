// The calls of a FusedMoE: what is the same on every engine.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <tuple>

#include "core/checked.h"
#include "core/fault.h"
#include "core/guarded.h"
#include "core/refusal.h"
#include "experts/problem_checks.h"
#include "layer/call_args.h"
#include "layer/expert_balancer.h"
#include "layer/fused_impl.h"
#include "numerics/element.h"

namespace moesaic {
namespace {

Status check_trace(std::string_view field, const TensorView& t, DType dtype, const Shape& shape) {
  if (!t.present()) return {};
  MOESAIC_RETURN_IF_ERROR(expect_dtype(field, t, dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, t, shape));
  MOESAIC_RETURN_IF_ERROR(expect_device(field, t, Device::cpu()));
  return expect_contiguous(field, t);
}

bool any_in_row(const ConstTensorView& t, std::int64_t row, bool (*is)(float)) {
  if (!t.present()) return false;
  const std::int64_t columns = t.dim(1);
  for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i) {
    if (is(load_as_f32(t.data, t.dtype, i))) return true;
  }
  return false;
}

// Of logits by which a router weighs the whole row with 0, or leaves an expert out.
bool spoils_routing(const ConstTensorView& logits, std::int64_t row) {
  if (!logits.present()) return false;
  return any_in_row(logits, row, [](float v) { return std::isnan(v) || v == HUGE_VALF; }) ||
         !any_in_row(logits, row, [](float v) { return std::isfinite(v); });
}

// What no expert's row shows: a sum that its dtype does not hold, a part that is none of theirs, and
// logits of the layer's own gate that are no numbers.
void report_rows_not_finite(const FusedMoE::Args& args, const ConstTensorView& own_logits) {
  const std::span<RowNumerics> numerics = args.trace.numerics;
  const auto not_finite = [](float v) { return !std::isfinite(v); };
  for (std::size_t i = 0; i < numerics.size(); ++i) {
    const auto t = static_cast<std::int64_t>(i);
    if (layer::is_padding(args, t) || MOESAIC_FAULT(layer_outputs_are_finite)) continue;
    if (any_in_row(args.output, t, not_finite) || any_in_row(args.shared_output, t, not_finite) ||
        spoils_routing(own_logits, t)) {
      numerics[i].flags |= kRowNotFinite;
    }
  }
}

}  // namespace

Status FusedMoE::Impl::check(const Args& args) const {
  const auto& [x, output, trace] = std::tie(args.hidden_states, args.output, args.trace);
  if (x.rank() != 2 || x.dim(1) != plan.hidden_size) {
    return {StatusCode::kInvalidShape, fmt::format("hidden_states: got {}, need [M, {}]",
                                                   x.shape.to_string(), plan.hidden_size)};
  }
  for (const auto& [field, dtype] :
       {std::pair{"hidden_states", x.dtype}, std::pair{"output", output.dtype}}) {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype(field, dtype));
  }
  MOESAIC_RETURN_IF_ERROR(expect_device("hidden_states", x, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_device("output", output, Device::cpu()));
  const std::int64_t rows = x.dim(0);
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", output, {rows, plan.hidden_size}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", output));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t input_bytes,
                           experts::strided_extent_bytes("hidden_states", x));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t output_bytes,
                           contiguous_bytes(output.dtype, output.shape));
  const bool same = output.data == x.data && output.dtype == x.dtype && x.is_contiguous();
  if (!(options.inplace && same)) {
    MOESAIC_RETURN_IF_ERROR(experts::expect_disjoint("output", output.data, output_bytes,
                                                     "hidden_states", x.data, input_bytes));
  }
  const std::int64_t k = plan.routing.top_k;
  const std::int64_t columns = plan.routing.num_experts + plan.routing.num_zero_experts;
  if (!trace.numerics.empty() && static_cast<std::int64_t>(trace.numerics.size()) != rows) {
    return {StatusCode::kInvalidShape,
            fmt::format("trace.numerics: got [{}], need [{}]", trace.numerics.size(), rows)};
  }
  if (!trace.numerics.empty() && (mesh || plan.has_output_transform)) {
    return {StatusCode::kUnsupported,
            "trace.numerics: got a layer over ranks or with an output transform, need one whose "
            "rows are added up here"};
  }
  MOESAIC_RETURN_IF_ERROR(
      check_trace("trace.router_logits", trace.router_logits, DType::kF32, {rows, columns}));
  MOESAIC_RETURN_IF_ERROR(
      check_trace("trace.topk_weights", trace.topk_weights, DType::kF32, {rows, k}));
  MOESAIC_RETURN_IF_ERROR(check_trace("trace.topk_ids", trace.topk_ids, DType::kI32, {rows, k}));
  MOESAIC_RETURN_IF_ERROR(check_shared_output(args, input_bytes, output_bytes));
  MOESAIC_RETURN_IF_ERROR(layer::check_traces_apart(args));
  MOESAIC_RETURN_IF_ERROR(layer::check_routing(plan, args, Device::cpu()));
  return layer::check_routing_values(plan, args);
}

Status FusedMoE::Impl::check_shared_output(const Args& args, std::int64_t input_bytes,
                                           std::int64_t output_bytes) const {
  const TensorView& t = args.shared_output;
  if (!t.present()) return {};
  MOESAIC_RETURN_IF_ERROR(layer::check_shared_output(plan, args, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("shared_output", t.dtype));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(t.dtype, t.shape));
  MOESAIC_RETURN_IF_ERROR(experts::expect_disjoint("shared_output", t.data, bytes, "output",
                                                   args.output.data, output_bytes));
  return experts::expect_disjoint("shared_output", t.data, bytes, "hidden_states",
                                  args.hidden_states.data, input_bytes);
}

// What a step of a call returns, or what it threw: an engine gives up what it refuses, not that.
template <class Step>
Status FusedMoE::Impl::step_of_call(std::string_view what, Step&& step) const {
  bool threw = true;
  const Status status = without_exceptions(what, [&]() -> Status {
    Status done = step();
    threw = false;
    return done;
  });
  return threw && mesh && !MOESAIC_FAULT(layer_others_wait_for_what_threw) ? mesh->give_up(status)
                                                                           : status;
}

Status FusedMoE::forward(const Args& args) const {
  const Impl& m = *impl_;
  Result<Args> call = layer::as_matrices(args);
  Status checked = call.status();
  if (checked.ok()) checked = m.check(*call);
  if (!m.mesh) MOESAIC_RETURN_IF_ERROR(checked);
  const std::lock_guard<std::mutex> lock(m.mutex);
  const std::int64_t rows = checked.ok() ? call->hidden_states.dim(0) : 0;
  // Of no rows there is no part, whatever the view says: ranks with the same rows do the same.
  if (rows == 0 && call.ok()) call->shared_output = {};
  std::int64_t chunk = m.plan.ranks.batch_rows;
  layer::RankMesh::Steps steps{ceil_div(rows, chunk)};
  // Every rank takes every step, also those that have no rows left.
  if (m.mesh) {
    MOESAIC_ASSIGN_OR_RETURN(steps,
                             m.mesh->common_steps(checked, rows, m.options.ranks.dual_batch_tokens,
                                                  rows > 0 && call->shared_output.present()));
  }
  if (steps.in_pairs) chunk = ceil_div(rows, std::max<std::int64_t>(steps.count, 1));
  const bool own_logits = checked.ok() && !call->trace.numerics.empty() && m.plan.has_gate &&
                          !call->router_logits.present() && !call->topk_ids.present();
  Tensor logits;
  if (own_logits && !call->trace.router_logits.present()) {
    const std::int64_t columns = m.plan.routing.num_experts + m.plan.routing.num_zero_experts;
    MOESAIC_ASSIGN_OR_RETURN(logits, Tensor::uninitialized(DType::kF32, {rows, columns}));
    call->trace.router_logits = logits.view();
  }
  layer::ExpertBalancer* const balancer = m.engine->balancer();
  if (balancer != nullptr) balancer->begin_step();
  const auto rows_of_step = [&](std::int64_t step) {
    const std::int64_t first = std::min(step * chunk, rows);
    return layer::rows_of_call(*call, first, std::min(chunk, rows - first));
  };
  for (std::int64_t step = 0; step < steps.count;) {
    if (steps.in_pairs && step + 1 < steps.count) {
      MOESAIC_RETURN_IF_ERROR(m.step_of_call("forward", [&] {
        return m.engine->forward_pair(rows_of_step(step), rows_of_step(step + 1));
      }));
      step += 2;
    } else {
      MOESAIC_RETURN_IF_ERROR(
          m.step_of_call("forward", [&] { return m.engine->forward_host(rows_of_step(step)); }));
      ++step;
    }
  }
  if (checked.ok()) {
    report_rows_not_finite(*call, own_logits ? call->trace.router_logits : TensorView());
  }
  return balancer != nullptr ? balancer->end_step() : Status();
}

Status FusedMoE::forward(ConstTensorView hidden_states, TensorView output,
                         const Trace& trace) const {
  Args args;
  args.hidden_states = hidden_states;
  args.output = output;
  args.trace = trace;
  return forward(args);
}

namespace {

// Of what is summed in host memory.
Result<std::int64_t> elements_of_sum(const TensorView& x) {
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("x", x.dtype));
  MOESAIC_RETURN_IF_ERROR(expect_device("x", x, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_shape("x", x, x.shape));  // a null view of elements
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("x", x));
  return x.shape.num_elements();
}

}  // namespace

Status FusedMoE::maybe_all_reduce(TensorView x, Stream stream) const {
  const Impl& m = *impl_;
  if (output_is_reduced()) return {};
  if (!m.mesh) {
    return {StatusCode::kUnsupported,
            "maybe_all_reduce: got a layer without a communicator, need one, or a sum over the "
            "ranks' outputs by the caller"};
  }
  if (x.device.is_cuda() && m.options.device.is_cuda()) {
    const std::lock_guard<std::mutex> lock(m.mutex);
    return m.step_of_call("maybe_all_reduce",
                          [&] { return m.engine->sum_over_replicas(stream, x); });
  }
  const Result<std::int64_t> checked = elements_of_sum(x);
  const std::lock_guard<std::mutex> lock(m.mutex);
  if (!checked.ok() && MOESAIC_FAULT(layer_others_wait_for_a_refused_sum)) return checked.status();
  const std::int64_t count = checked.ok() ? *checked : 0;
  MOESAIC_RETURN_IF_ERROR(layer::agree(*m.mesh->replicas(), "maybe_all_reduce", checked.status(),
                                       count, "another number of elements",
                                       m.mesh->replica_ranks()));
  if (x.dtype == DType::kF32) {
    return m.mesh->reduce_replicas({x.as<float>(), static_cast<std::size_t>(count)});
  }
  Result<Tensor> wide = Tensor::uninitialized(DType::kF32, x.shape);
  if (!wide.ok()) return m.mesh->give_up(wide.status());
  float* const sums = wide->as<float>();
  for (std::int64_t i = 0; i < count; ++i) sums[i] = load_as_f32(x.data, x.dtype, i);
  MOESAIC_RETURN_IF_ERROR(m.mesh->reduce_replicas({sums, static_cast<std::size_t>(count)}));
  for (std::int64_t i = 0; i < count; ++i) store_from_f32(x.data, x.dtype, i, sums[i]);
  return {};
}

Status FusedMoE::health() const {
  MOESAIC_RETURN_IF_ERROR(impl_->engine->health());
  return impl_->mesh ? impl_->mesh->world()->state() : Status();
}

Status FusedMoE::enqueue(Stream stream, const Args& args) const {
  const std::lock_guard<std::mutex> lock(impl_->mutex);  // one call is many launches
  return impl_->step_of_call("enqueue", [&] { return impl_->engine->enqueue(stream, args); });
}

Status FusedMoE::enqueue(Stream stream, ConstTensorView hidden_states, TensorView output,
                         const Trace& trace) const {
  Args args;
  args.hidden_states = hidden_states;
  args.output = output;
  args.trace = trace;
  return enqueue(stream, args);
}

}  // namespace moesaic
