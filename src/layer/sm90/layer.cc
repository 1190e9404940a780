#include "layer/sm90/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "cuda/dense_rows.h"
#include "layer/call_args.h"
#include "layer/layer_router.h"
#include "layer/load_sources.h"
#include "layer/slot_source.h"
#include "layer/sm90/layer_impl.h"
#include "layer/sm90/layer_ops.h"
#include "numerics/element.h"

namespace moesaic::cuda {

namespace {

// The experts of one source, then those of another.
class JoinedSource final : public ExpertSource {
 public:
  JoinedSource(ExpertSource& first, std::int64_t count, ExpertSource& second)
      : first_(first), count_(count), second_(second) {}
  Result<ExpertWeightsView> expert(std::int64_t e) override {
    return e < count_ ? first_.expert(e) : second_.expert(e - count_);
  }

 private:
  ExpertSource& first_;
  std::int64_t count_;
  ExpertSource& second_;
};

// Fills max_tokens words with one value.
Status upload_constant(std::string_view what, std::int64_t count, std::uint32_t value,
                       Allocation& to) {
  try {
    const std::vector<std::uint32_t> words(static_cast<std::size_t>(count), value);
    return upload(what, words.data(), count * 4, to);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory, fmt::format("{}: {} words on the host", what, count)};
  }
}

}  // namespace

Status CudaLayer::Impl::create_experts(const layer::EngineParts& parts) {
  MoeLayerWeights& weights = parts.weights;
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> routed,
                           layer::make_converting_source(*weights.experts, plan.quant));
  if (plan.routed.num_local_experts == 0) return {};  // more ranks than experts
  if (const FusedMoE::Options& o = parts.options; o.ranks.enable_eplb) {
    const std::int64_t logical = parts.spec.num_experts, physical = plan.routed.num_experts;
    MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<DeviceBalance> memory,
                             DeviceBalance::create(device, logical, physical, o.ranks.eplb_window));
    balance = memory.get();
    MOESAIC_ASSIGN_OR_RETURN(
        balancer,
        layer::ExpertBalancer::create({logical, physical, o.parallel.ep_size, o.parallel.ep_rank},
                                      o.ranks.eplb_window, std::move(memory)));
    layer::SlotSource slots(*routed, balancer->local_experts());
    MOESAIC_ASSIGN_OR_RETURN(experts, chosen.routed->create(plan.routed, slots, device));
    return {};
  }
  if (!joins) {
    MOESAIC_ASSIGN_OR_RETURN(experts, chosen.routed->create(plan.routed, *routed, device));
    return {};
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> converted,
                           layer::make_converting_source(*weights.shared, plan.shared_quant));
  JoinedSource source(*routed, plan.routed.num_local_experts, *converted);
  MOESAIC_ASSIGN_OR_RETURN(experts,
                           chosen.routed->create(experts_problem(plan, false), source, device));
  return {};
}

Status CudaLayer::Impl::create_shared(const MoeLayerSpec& spec, const FusedMoE::Options& options,
                                      MoeLayerWeights& weights) {
  if (!joins) {
    MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> converted,
                             layer::make_converting_source(*weights.shared, plan.shared_quant));
    MOESAIC_ASSIGN_OR_RETURN(shared, chosen.shared->create(plan.shared, *converted, device));
  }
  if (!spec.shared.gated_output) {
    constexpr std::uint32_t kOne = 0x3F800000;  // 1.0F
    const auto id = static_cast<std::uint32_t>(joins ? plan.routed.num_experts : 0);
    MOESAIC_RETURN_IF_ERROR(upload_constant("shared weights", options.max_tokens, kOne, ones));
    return upload_constant("shared ids", options.max_tokens, id, shared_ids);
  }
  MOESAIC_ASSIGN_OR_RETURN(shared_gate,
                           CudaGate::create(weights.tensors.shared_gate_weight.view(), {}));
  Router::Options router_options;
  router_options.spec.method = RoutingMethod::kLlama4;
  router_options.spec.num_experts = router_options.spec.top_k = 1;
  MOESAIC_ASSIGN_OR_RETURN(shared_router, CudaRouter::create(router_options, device));
  return {};
}

CudaLayer::CudaLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaLayer::~CudaLayer() = default;

Result<std::unique_ptr<layer::LayerEngine>> make_sm90_engine(const layer::EngineParts& parts) {
  return CudaLayer::create(parts);
}

// All that needs no other rank.
Status CudaLayer::Impl::create_own(const layer::EngineParts& parts) {
  const MoeLayerSpec& spec = parts.spec;
  const FusedMoE::Options& options = parts.options;
  MoeLayerWeights& weights = parts.weights;
  const MoeLayerTensors& t = weights.tensors;
  if (plan.has_gate) {
    Result<CudaGate> made =
        CudaGate::create(t.gate_weight.view(), t.gate_bias.view(), plan.logit_rounding());
    if (!made.ok()) return made.status().with_context("gate");
    gate = std::move(made).value();
  }
  functions = options.on_device;
  if (plan.shared_stream && plan.adds_shared) {
    beside.reset(new (std::nothrow) Impl::Beside());
    if (!beside) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
    MOESAIC_RETURN_IF_ERROR(beside->stream.create());
  }
  Router::Options router_options = layer::layer_router_options(plan, t);
  router_options.device = options.device;
  router_options.custom_on_device = options.on_device.custom_routing;
  Result<std::unique_ptr<CudaRouter>> made = CudaRouter::create(router_options, device);
  if (!made.ok()) return made.status().with_context("router");
  router = std::move(made).value();
  joins = shared_joins(plan, spec.shared.gated_output);
  if (joins) {
    router_options.num_fused_shared_experts = 1;
    MOESAIC_ASSIGN_OR_RETURN(joined_router, CudaRouter::create(router_options, device));
  }
  if (!plan.expert_map.empty()) {
    std::vector<std::int32_t> map = plan.expert_map;
    if (joins) map.push_back(static_cast<std::int32_t>(plan.routed.num_local_experts));
    MOESAIC_RETURN_IF_ERROR(
        upload("expert_map", map.data(), static_cast<std::int64_t>(map.size()) * 4, expert_map));
  }
  MOESAIC_RETURN_IF_ERROR(create_experts(parts).with_context("experts"));
  if (plan.has_shared) {
    MOESAIC_RETURN_IF_ERROR(create_shared(spec, options, weights).with_context("shared_experts"));
  }
  return {};
}

Result<std::unique_ptr<layer::LayerEngine>> CudaLayer::create(const layer::EngineParts& parts) {
  const auto& [spec, plan, options, weights, mesh] = parts;
  MOESAIC_RETURN_IF_ERROR(can_implement(plan, options));
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl());
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  impl->plan = plan;
  MOESAIC_ASSIGN_OR_RETURN(impl->chosen, choose_layer_experts(plan));
  impl->mesh = mesh;
  impl->max_tokens = options.max_tokens;
  impl->device = options.device.index();
  const DeviceScope scope(impl->device);
  Status own = scope.status();
  if (own.ok()) own = impl->create_own(parts);
  if (!own.ok()) {
    return mesh != nullptr ? impl->withdraw_from_ranks(own) : own;
  }
  if (mesh != nullptr) {
    MOESAIC_RETURN_IF_ERROR(impl->create_ranks(options).with_context("ranks"));
  }
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(
      const LayerWorkspace unused,
      LayerWorkspace::carve(plan, impl->shared_gate.has_value(), options.max_tokens, arena));
  static_cast<void>(unused);
  MOESAIC_RETURN_IF_ERROR(impl->workspace.reserve("workspace", arena.used()));
  MOESAIC_RETURN_IF_ERROR(impl->make_prologue_plans());
  std::unique_ptr<layer::LayerEngine> layer(new (std::nothrow) CudaLayer(std::move(impl)));
  if (!layer) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  return layer;
}

// --- Calls ---------------------------------------------------------------------------------------

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
  if (m.takes_any_rows()) {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", x.dtype));
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("output", output.dtype));
  } else {
    MOESAIC_RETURN_IF_ERROR(expect_dtype("hidden_states", x, DType::kBF16));
    if (output.dtype != DType::kBF16 && output.dtype != DType::kF32) {
      return {StatusCode::kInvalidDType,
              fmt::format("output: got {}, need BF16 or F32", dtype_name(output.dtype))};
    }
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
  return check_trace("trace.topk_ids", trace.topk_ids, DType::kI32, slots, m.device);
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
  for (std::int64_t step = 0; step < steps; ++step) {
    const std::int64_t first = std::min(step * chunk, rows);
    const Status status = m.enqueue_rows(
        stream, layer::rows_of_call(*matrices, first, std::min(chunk, rows - first)));
    if (!status.ok()) return m.mesh != nullptr ? m.give_up(stream.handle, status) : status;
  }
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
  MOESAIC_RETURN_IF_ERROR(m.mesh == nullptr ? m.run(stream, rows, out)
                                            : m.run_over_ranks(stream, rows, out));
  MOESAIC_RETURN_IF_ERROR(synchronize(stream));
  if (m.peers != nullptr) MOESAIC_RETURN_IF_ERROR(m.peers->health());
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

layer::ExpertBalancer* CudaLayer::balancer() const { return impl_->balancer.get(); }

Result<std::vector<ExpertPart>> CudaLayer::expert_parts() const {
  try {
    if (!impl_->experts) return std::vector<ExpertPart>();
    return impl_->experts->expert_parts(impl_->plan.routed.num_local_experts);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "get_expert_weights: cannot allocate the list");
  }
}

std::string_view CudaLayer::experts_backend() const { return impl_->chosen.routed->name; }
std::string CudaLayer::determinism() const { return sm90_determinism(impl_->plan); }
std::int64_t CudaLayer::weight_bytes() const {
  const Impl& m = *impl_;
  return (m.gate ? m.gate->bytes() : 0) + (m.experts ? m.experts->weight_bytes() : 0) +
         (m.shared ? m.shared->weight_bytes() : 0) + (m.shared_gate ? m.shared_gate->bytes() : 0);
}
std::int64_t CudaLayer::workspace_bytes() const {
  const Impl& m = *impl_;
  return m.workspace.bytes() + m.slot_rows.bytes() + m.transport_bytes +
         (m.balance != nullptr ? m.balance->bytes() : 0) + (m.replicas ? m.replicas->bytes() : 0);
}

}  // namespace moesaic::cuda
