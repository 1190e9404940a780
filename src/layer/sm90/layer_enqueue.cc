// Calls of a CudaLayer on device tensors: checks, steps, launches.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "cuda/dense_rows.h"
#include "layer/call_args.h"
#include "layer/sm90/layer_impl.h"
#include "layer/sm90/layer_ops.h"

namespace moesaic::cuda {

namespace {

Status check_device_tensor(std::string_view field, const ConstTensorView& t, int device) {
  MOESAIC_RETURN_IF_ERROR(expect_device(field, t, Device::cuda(device)));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, t));
  return check_device_pointer(field, t.data, 16, device);
}

Status check_trace(std::string_view field, const TensorView& t, DType dtype, const Shape& shape,
                   int device) {
  if (!t.present()) return {};
  MOESAIC_RETURN_IF_ERROR(expect_dtype(field, t, dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, t, shape));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, t));
  MOESAIC_RETURN_IF_ERROR(expect_device(field, t, Device::cuda(device)));
  return check_device_pointer(field, t.data, 4, device);
}

}  // namespace

Status CudaLayer::Impl::check(const FusedMoE::Args& args) const {
  const Impl& m = *this;
  const auto& [x, output, trace] = std::tie(args.hidden_states, args.output, args.trace);
  if (x.rank() != 2 || x.dim(1) != m.plan.hidden_size) {
    return {StatusCode::kInvalidShape, fmt::format("hidden_states: got {}, need [M, {}]",
                                                   x.shape.to_string(), m.plan.hidden_size)};
  }
  const std::int64_t tokens = x.dim(0);
  const bool any_rows = m.takes_any_rows() || m.takes_rounded_rows();
  if (any_rows) {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", x.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("output", output.dtype));
  } else {
    MOESAIC_RETURN_IF_ERROR(expect_dtype("hidden_states", x, DType::kBF16));
  }
  if (!any_rows && output.dtype != DType::kBF16 && output.dtype != DType::kF32) {
    return {StatusCode::kInvalidDType,
            fmt::format("output: got {}, need BF16 or F32", dtype_name(output.dtype))};
  }
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", output, {tokens, m.plan.hidden_size}));
  if (tokens > m.max_tokens && m.rows_at_once(args) == 0) {
    return {StatusCode::kLimitExceeded,
            fmt::format("tokens: got {}, planned for max_tokens = {}, {}; need at most that many",
                        tokens, m.max_tokens,
                        m.peers != nullptr
                            ? std::string("in one step through peer windows")
                            : fmt::format("whose rows of {} elements are no whole 16 bytes",
                                          m.plan.hidden_size))};
  }
  const TensorView& part = args.shared_output;
  MOESAIC_RETURN_IF_ERROR(layer::check_shared_output(m.plan, args, Device::cuda(m.device)));
  if (part.present() && part.dtype != DType::kBF16 && part.dtype != DType::kF32) {
    return {StatusCode::kInvalidDType,
            fmt::format("shared_output: got {}, need BF16 or F32", dtype_name(part.dtype))};
  }
  if (!trace.numerics.empty()) {
    return {StatusCode::kUnsupported,
            "trace.numerics: got enqueue, which does not wait; forward measures"};
  }
  if (tokens == 0) return {};
  MOESAIC_RETURN_IF_ERROR(expect_device("hidden_states", x, Device::cuda(m.device)));
  MOESAIC_RETURN_IF_ERROR(expect_rows("hidden_states", x));
  MOESAIC_RETURN_IF_ERROR(check_device_pointer(
      "hidden_states", x.data, x.is_contiguous() ? 16 : dtype_bits(x.dtype) / 8, m.device));
  MOESAIC_RETURN_IF_ERROR(check_device_tensor("output", output, m.device));
  const bool same = output.data == x.data && output.dtype == x.dtype && x.is_contiguous();
  if (!(m.plan.inplace && same)) {
    MOESAIC_RETURN_IF_ERROR(expect_no_overlap("output", output, "hidden_states", rows_extent(x)));
  }
  if (part.present()) {
    MOESAIC_RETURN_IF_ERROR(check_device_tensor("shared_output", part, m.device));
    MOESAIC_RETURN_IF_ERROR(expect_no_overlap("shared_output", part, "output", output));
    MOESAIC_RETURN_IF_ERROR(
        expect_no_overlap("shared_output", part, "hidden_states", rows_extent(x)));
  }
  MOESAIC_RETURN_IF_ERROR(layer::check_routing(m.plan, args, Device::cuda(m.device)));
  const auto check_given = [&](std::string_view field, const ConstTensorView& t) {
    if (!t.present()) return Status();
    return check_device_pointer(field, t.data, dtype_bits(t.dtype) / 8, m.device);
  };
  MOESAIC_RETURN_IF_ERROR(check_given("router_logits", args.router_logits));
  MOESAIC_RETURN_IF_ERROR(check_given("topk_weights", args.topk_weights));
  MOESAIC_RETURN_IF_ERROR(check_given("topk_ids", args.topk_ids));
  MOESAIC_RETURN_IF_ERROR(check_given("input_ids", args.input_ids));
  MOESAIC_RETURN_IF_ERROR(check_given("padding_mask", args.padding_mask));
  const std::int64_t columns = m.plan.routing.num_experts + m.plan.routing.num_zero_experts;
  const Shape slots{tokens, m.plan.routed.top_k};
  MOESAIC_RETURN_IF_ERROR(check_trace("trace.router_logits", trace.router_logits, DType::kF32,
                                      {tokens, columns}, m.device));
  MOESAIC_RETURN_IF_ERROR(
      check_trace("trace.topk_weights", trace.topk_weights, DType::kF32, slots, m.device));
  MOESAIC_RETURN_IF_ERROR(
      check_trace("trace.topk_ids", trace.topk_ids, DType::kI32, slots, m.device));
  return layer::check_traces_apart(args);
}

std::int64_t CudaLayer::Impl::rows_at_once(const FusedMoE::Args& args) const {
  if (peers != nullptr) return 0;  // the host, which would agree on steps, does not wait
  // Kernels read and write whole 16 bytes where a step's rows begin.
  const auto whole = [&](DType dtype) {
    return max_tokens * plan.hidden_size * dtype_bits(dtype) % 128 == 0;
  };
  if (whole(args.hidden_states.dtype) && whole(args.output.dtype) &&
      (!args.shared_output.present() || whole(args.shared_output.dtype))) {
    return max_tokens;
  }
  return mesh == nullptr ? max_tokens / 8 * 8 : 0;  // ranks take steps of one size
}

Status CudaLayer::enqueue(Stream stream, const FusedMoE::Args& call) const {
  const Impl& m = *impl_;
  Result<FusedMoE::Args> matrices = layer::as_matrices(call);
  const DeviceScope scope(m.device);
  Status checked = scope.status();
  if (checked.ok()) checked = matrices.status();
  if (checked.ok()) checked = m.check(*matrices);
  if (m.mesh == nullptr) MOESAIC_RETURN_IF_ERROR(checked);
  const std::int64_t rows = checked.ok() ? matrices->hidden_states.dim(0) : 0;
  std::int64_t chunk = m.max_tokens;
  if (rows > chunk) chunk = m.rows_at_once(*matrices);
  std::int64_t steps = ceil_div(rows, chunk);
  if (m.mesh != nullptr) {
    MOESAIC_ASSIGN_OR_RETURN(steps, m.start_call(stream.handle, checked, rows,
                                                 rows > 0 && matrices->shared_output.present()));
  }
  if (MOESAIC_FAULT(cuda_layer_leaves_rows_of_long_calls)) steps = std::min<std::int64_t>(steps, 1);
  Status status;
  for (std::int64_t step = 0; status.ok() && step < steps; ++step) {
    const std::int64_t first = std::min(step * chunk, rows);
    status = m.enqueue_rows(stream,
                            layer::rows_of_call(*matrices, first, std::min(chunk, rows - first)));
  }
  // What a call has launched before it failed is in the workspace as long.
  Status ended;
  if (status.ok() || !MOESAIC_FAULT(cuda_failed_call_is_not_waited_for)) {
    ended = impl_->last_call.end(stream.handle);
  }
  if (!status.ok()) return m.mesh != nullptr ? m.give_up(stream.handle, status) : status;
  MOESAIC_RETURN_IF_ERROR(ended);
  return m.balance != nullptr ? m.balance->end_call(stream.handle) : Status();
}

Status CudaLayer::Impl::enqueue_rows(Stream stream, const FusedMoE::Args& args) const {
  const Impl& m = *this;
  ConstTensorView x = args.hidden_states;
  const auto& [output, trace] = std::tie(args.output, args.trace);
  DenseRows dense(stream.handle);
  if (x.dim(0) > 0) {
    MOESAIC_ASSIGN_OR_RETURN(x, dense.of("hidden_states", x, 16));
  }
  Impl::Out out;
  out.output = output.data;
  out.dtype = output.dtype;
  out.shared = args.shared_output.data;
  out.shared_dtype = args.shared_output.dtype;
  out.logits = trace.router_logits.as<float>();
  out.topk_weights = trace.topk_weights.as<float>();
  out.topk_ids = trace.topk_ids.as<std::int32_t>();
  Impl::Rows rows = {x.data, x.dtype, x.data, x.dim(0)};
  if (m.takes_rounded_rows() && x.dtype != DType::kBF16 && rows.tokens > 0) {
    // As the steps behind this one see it: over ranks the whole of it.
    MOESAIC_ASSIGN_OR_RETURN(const LayerWorkspace w,
                             m.carve(m.mesh == nullptr ? rows.tokens : m.max_tokens));
    MOESAIC_RETURN_IF_ERROR(
        check_call("hidden_states to bf16",
                   launch_round_to_bf16(x.data, x.dtype, rows.tokens * m.plan.hidden_size,
                                        w.rows_bf16, stream.handle)));
    if (!MOESAIC_FAULT(cuda_layer_rows_are_not_rounded)) rows.x_bf16 = w.rows_bf16;
  }
  rows.given = {args.router_logits.data,
                args.router_logits.dtype,
                args.topk_weights.as<float>(),
                args.topk_ids.data,
                args.topk_ids.dtype,
                args.input_ids.as<std::int32_t>(),
                args.padding_mask.as<std::uint8_t>()};
  return m.mesh == nullptr ? m.run(stream.handle, rows, out)
                           : m.run_over_ranks(stream.handle, rows, out);
}

}  // namespace moesaic::cuda
