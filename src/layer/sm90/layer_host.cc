// Calls of a CudaLayer on host tensors: copied in, computed, waited for, copied out.
#include <tuple>
#include <utility>

#include "core/fault.h"
#include "core/refusal.h"
#include "layer/call_args.h"
#include "layer/sm90/layer_impl.h"
#include "layer/sm90/layer_ops.h"
#include "numerics/element.h"

namespace moesaic::cuda {

Status CudaLayer::Impl::make_staging() const {
  if (staging.ids.bytes() > 0) return {};
  const std::int64_t rows = max_tokens;
  const std::int64_t columns = plan.routing.num_experts + plan.routing.num_zero_experts;
  MOESAIC_RETURN_IF_ERROR(staging.x.reserve("hidden_states", rows * plan.hidden_size * 4));
  MOESAIC_RETURN_IF_ERROR(staging.x_bf16.reserve("hidden_states", rows * plan.hidden_size * 2));
  MOESAIC_RETURN_IF_ERROR(staging.output.reserve("output", rows * plan.hidden_size * 4));
  if (plan.adds_shared) {
    MOESAIC_RETURN_IF_ERROR(
        staging.shared_output.reserve("shared_output", rows * plan.hidden_size * 4));
  }
  MOESAIC_RETURN_IF_ERROR(staging.logits.reserve("router_logits", rows * columns * 4));
  MOESAIC_RETURN_IF_ERROR(staging.weights.reserve("topk_weights", rows * plan.routed.top_k * 4));
  MOESAIC_RETURN_IF_ERROR(staging.input_ids.reserve("input_ids", rows * 4));
  MOESAIC_RETURN_IF_ERROR(staging.padding.reserve("padding_mask", rows));
  return staging.ids.reserve("topk_ids", rows * plan.routed.top_k * 4);
}

// Host tensors, already checked: logits and ids arrive where the layer's own would be made.
Result<CudaLayer::Impl::Given> CudaLayer::Impl::stage_given(const FusedMoE::Args& args) const {
  Given given;
  const std::int64_t tokens = args.hidden_states.dim(0);
  if (const ConstTensorView& logits = args.router_logits; logits.present()) {
    MOESAIC_ASSIGN_OR_RETURN(Tensor wide, Tensor::uninitialized(DType::kF32, logits.shape));
    for (std::int64_t i = 0; i < tokens * logits.dim(1); ++i) {
      wide.as<float>()[i] = load_as_f32(logits.data, logits.dtype, i);
    }
    given.logits = staging.logits.as<void>();
    MOESAIC_RETURN_IF_ERROR(
        copy_to_device("router_logits", staging.logits.as<void>(), wide.data(), wide.bytes()));
  }
  if (const ConstTensorView& ids = args.topk_ids; ids.present()) {
    MOESAIC_ASSIGN_OR_RETURN(Tensor narrow, Tensor::uninitialized(DType::kI32, ids.shape));
    for (std::int64_t i = 0; i < tokens * ids.dim(1); ++i) {
      // What stands in a row of padding may need more bits; it is not looked at.
      narrow.as<std::int32_t>()[i] = static_cast<std::int32_t>(layer::id_at(ids, i));
    }
    given.ids = staging.ids.as<void>();
    given.weights = staging.weights.as<float>();
    MOESAIC_RETURN_IF_ERROR(
        copy_to_device("topk_ids", staging.ids.as<void>(), narrow.data(), narrow.bytes()));
    MOESAIC_RETURN_IF_ERROR(copy_to_device("topk_weights", staging.weights.as<void>(),
                                           args.topk_weights.data, narrow.bytes()));
  }
  if (args.input_ids.present()) {
    given.input_ids = staging.input_ids.as<std::int32_t>();
    MOESAIC_RETURN_IF_ERROR(
        copy_to_device("input_ids", staging.input_ids.as<void>(), args.input_ids.data, tokens * 4));
  }
  if (args.padding_mask.present()) {
    given.padding = staging.padding.as<std::uint8_t>();
    MOESAIC_RETURN_IF_ERROR(
        copy_to_device("padding_mask", staging.padding.as<void>(), args.padding_mask.data, tokens));
  }
  return given;
}

namespace {

// A result on the device, F32 where F16 is wanted, to the host.
Status bring_rows(std::string_view field, const void* from, const TensorView& to) {
  const std::int64_t count = to.dim(0) * to.dim(1);
  if (to.dtype != DType::kF16) {
    return copy_to_host(field, to.data, from, count * (dtype_bits(to.dtype) / 8));
  }
  MOESAIC_ASSIGN_OR_RETURN(Tensor wide, Tensor::uninitialized(DType::kF32, to.shape));
  MOESAIC_RETURN_IF_ERROR(copy_to_host(field, wide.data(), from, wide.bytes()));
  for (std::int64_t i = 0; i < count; ++i) {
    store_from_f32(to.data, DType::kF16, i, wide.as<float>()[i]);
  }
  return {};
}

}  // namespace

Status CudaLayer::forward_host(const FusedMoE::Args& args) const {
  Status status = impl_->forward_host(args);
  if (impl_->mesh == nullptr) return status;
  return impl_->give_up(impl_->peers != nullptr ? impl_->peers->stream() : nullptr, status);
}

Status CudaLayer::Impl::forward_host(const FusedMoE::Args& args) const {
  const Impl& m = *this;
  const auto& [x, output, trace] = std::tie(args.hidden_states, args.output, args.trace);
  const std::int64_t tokens = x.dim(0);
  const std::int64_t hidden = m.plan.hidden_size;
  if (tokens == 0 && m.mesh == nullptr) return {};
  const DeviceScope scope(m.device);
  MOESAIC_RETURN_IF_ERROR(scope.status());
  const bool first = m.staging.ids.bytes() == 0;
  MOESAIC_RETURN_IF_ERROR(m.make_staging());
  // No rank allocates while a kernel of another waits for it.
  if (first && m.peers != nullptr) {
    MOESAIC_RETURN_IF_ERROR(m.mesh->world()->control().barrier("forward"));
  }
  const Impl::Staging& s = m.staging;
  const std::int64_t element = dtype_bits(x.dtype) / 8;
  for (std::int64_t t = 0; t < tokens; ++t) {
    // One copy when rows are dense.
    const bool dense = x.strides[0] == hidden;
    MOESAIC_RETURN_IF_ERROR(copy_to_device(
        "hidden_states", s.x.as<std::byte>() + t * hidden * element,
        x.data + t * x.strides[0] * element, (dense ? tokens : 1) * hidden * element));
    if (dense) break;
  }
  Impl::Rows rows;
  rows.x = rows.x_bf16 = s.x.as<void>();
  rows.x_dtype = x.dtype;
  rows.tokens = tokens;
  if (x.dtype != DType::kBF16 && !m.takes_any_rows()) {
    MOESAIC_RETURN_IF_ERROR(check_call(
        "hidden_states to bf16", launch_round_to_bf16(rows.x, x.dtype, tokens * hidden,
                                                      s.x_bf16.as<std::uint16_t>(), nullptr)));
    rows.x_bf16 = s.x_bf16.as<void>();
  }
  if (tokens > 0) {
    MOESAIC_ASSIGN_OR_RETURN(rows.given, m.stage_given(args));
  }
  Impl::Out out;
  out.output = s.output.as<void>();
  // F16 is rounded on the host.
  const auto on_device = [](DType dtype) {
    return dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
  };
  out.dtype = on_device(output.dtype);
  if (args.shared_output.present()) {
    out.shared = s.shared_output.as<void>();
    out.shared_dtype = on_device(args.shared_output.dtype);
  }
  out.logits = s.logits.as<float>();
  out.topk_weights = s.weights.as<float>();
  out.topk_ids = s.ids.as<std::int32_t>();
  out.numerics = trace.numerics;
  std::fill(trace.numerics.begin(), trace.numerics.end(), RowNumerics());
  void* stream = nullptr;
  if (m.peers != nullptr) {
    // Ranks that share a device share its default stream, where one would wait for another.
    MOESAIC_RETURN_IF_ERROR(m.peers->health());
    MOESAIC_RETURN_IF_ERROR(synchronize(nullptr));
    stream = m.peers->stream();
  }
  MOESAIC_RETURN_IF_ERROR(m.last_call.before(stream));  // it may be in the workspace still
  const Status ran =
      m.mesh == nullptr ? m.run(stream, rows, out) : m.run_over_ranks(stream, rows, out);
  // What a call has launched before it failed is in the workspace as long. Over ranks none follows it.
  const bool waits =
      ran.ok() || (m.mesh == nullptr && !MOESAIC_FAULT(cuda_failed_call_is_not_waited_for));
  const Status done = waits ? synchronize(stream) : Status();
  MOESAIC_RETURN_IF_ERROR(ran);
  MOESAIC_RETURN_IF_ERROR(done);
  if (m.peers != nullptr) MOESAIC_RETURN_IF_ERROR(m.peers->health());
  layer::forget_padding(args);
  if (tokens == 0) return {};
  MOESAIC_RETURN_IF_ERROR(bring_rows("output", out.output, output));
  if (args.shared_output.present()) {
    MOESAIC_RETURN_IF_ERROR(bring_rows("shared_output", out.shared, args.shared_output));
  }
  const auto report = [](std::string_view field, const TensorView& to, const void* from) {
    return to.present() ? copy_to_host(field, to.data, from, to.dim(0) * to.dim(1) * 4) : Status();
  };
  MOESAIC_RETURN_IF_ERROR(report("router_logits", trace.router_logits, out.logits));
  MOESAIC_RETURN_IF_ERROR(report("topk_weights", trace.topk_weights, out.topk_weights));
  return report("topk_ids", trace.topk_ids, out.topk_ids);
}

}  // namespace moesaic::cuda
