#include "moesaic/fused_moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "core/arena.h"
#include "core/fault.h"
#include "experts/problem_checks.h"
#include "layer/fused_plan.h"
#include "layer/load_sources.h"
#include "moesaic/gate.h"
#include "moesaic/modular_kernel.h"
#include "numerics/element.h"

namespace moesaic {

struct FusedMoE::Impl {
  MoeLayerSpec spec;
  FusedPlan plan;
  Options options;
  std::optional<GateLinear> gate;
  std::optional<Router> router;
  std::optional<ModularKernel> kernel;
  std::optional<ModularKernel> shared;
  std::optional<GateLinear> shared_gate;
  std::int64_t small_bytes = 0;  // gate and shared gate weights
  Tensor workspace;
  mutable std::mutex mutex;  // one call at a time uses the workspace

  // Buffers of one chunk of at most max_tokens rows.
  struct Buffers {
    float* logits = nullptr;            // [C, E + zero experts]
    float* topk_weights = nullptr;      // [C, k]
    std::int32_t* topk_ids = nullptr;   // [C, k]
    std::byte* latent = nullptr;        // [C, latent], dtype of the hidden states
    float* routed = nullptr;            // [C, latent]
    float* routed_back = nullptr;       // [C, H], after the output transform
    float* shared = nullptr;            // [C, H]
    float* shared_gate = nullptr;       // [C]
    float* ones = nullptr;              // [C]: the shared expert's weight ...
    std::int32_t* zeros = nullptr;      // [C]: ... and id
    std::byte* zero_experts = nullptr;  // [C, H] F32
  };

  std::int64_t logit_columns() const {
    return spec.routing.num_experts + spec.routing.num_zero_experts;
  }
  // The routed experts may round straight into the caller's output when nothing is added to or
  // multiplied with their result.
  bool writes_output_directly() const {
    return !plan.has_shared && !plan.has_zero_experts && !options.routed_output_transform &&
           plan.output_scale == 1.0F;
  }
  Result<Buffers> carve(Arena& arena, std::int64_t rows) const;
  Status check(const ConstTensorView& x, const TensorView& output, const Trace& trace) const;
  Status forward_chunk(const ConstTensorView& x, const TensorView& output,
                       const Trace& trace) const;
  Status route(const ConstTensorView& x, const Buffers& b, const Trace& trace) const;
  Status run_routed(const ConstTensorView& x, const Buffers& b, const TensorView& output) const;
  Status run_shared(const ConstTensorView& x, const Buffers& b) const;
  void combine(const ConstTensorView& x, const Buffers& b, const TensorView& output) const;
};

namespace {

constexpr std::int64_t kMaxElementBytes = 4;  // of hidden states: F32

TensorView view_of(void* data, DType dtype, const Shape& shape) {
  return {static_cast<std::byte*>(data), dtype, shape};
}

// Rows [first, first + count) of a matrix whose rows may be apart.
template <class Byte>
BasicTensorView<Byte> rows_of(const BasicTensorView<Byte>& t, std::int64_t first,
                              std::int64_t count) {
  BasicTensorView<Byte> part = t;
  if (t.present()) part.data += first * t.strides[0] * (dtype_bits(t.dtype) / 8);
  part.shape = Shape{count, t.dim(1)};
  return part;
}

Status check_present(std::string_view field, const Tensor& t, bool wanted) {
  if (t.present() == wanted) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: got {}, the layer's spec needs {}", field,
                      t.present() ? t.shape().to_string() : "none", wanted ? "one" : "none")};
}

Status check_trace(std::string_view field, const TensorView& t, DType dtype, const Shape& shape) {
  if (!t.present()) return {};
  MOESAIC_RETURN_IF_ERROR(expect_dtype(field, t, dtype));
  MOESAIC_RETURN_IF_ERROR(expect_shape(field, t, shape));
  return expect_contiguous(field, t);
}

// The first accepted backend, or the forced one. A shared expert is a different problem, which a
// backend forced for the routed experts may refuse; then the choice is automatic there.
Result<const ExpertsBackend*> choose_backend(const MoeProblem& problem, const std::string& forced,
                                             bool shared) {
  Result<const ExpertsBackend*> row = choose_experts(problem, forced);
  if (!row.ok() && shared && row.status().code() == StatusCode::kUnsupported) {
    row = choose_experts(problem);
  }
  return row;
}

Result<ModularKernel> make_kernel(const MoeProblem& problem, const QuantPlan& quant,
                                  ExpertSource& source, const std::string& forced, bool shared) {
  MOESAIC_ASSIGN_OR_RETURN(const ExpertsBackend* row, choose_backend(problem, forced, shared));
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> converted,
                           make_converting_source(source, quant));
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<Experts> experts, row->create(problem, *converted));
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<PrepareAndFinalize> pf,
                           make_local_prepare_finalize(problem));
  ModularKernel::Options kernel_options;
  kernel_options.max_tokens = problem.max_tokens;
  return ModularKernel::create(problem, std::move(pf), std::move(experts), kernel_options);
}

Result<GateLinear> make_gate(const Tensor& weight, const Tensor& bias, int num_threads) {
  // Logits in fp32 whatever the weight's dtype: a bf16 rounding could flip near-ties.
  GateLinear::Options options;
  options.out_dtype = DType::kF32;
  options.force_fp32_compute = true;
  options.num_threads = num_threads;
  return GateLinear::create(weight.view(), bias.view(), options);
}

Result<Router> make_router(const FusedPlan& plan, const FusedMoE::Options& options,
                           const ConstTensorView& correction_bias) {
  Router::Options router;
  router.spec = plan.routing;
  router.correction_bias = correction_bias;
  router.custom = options.custom_routing;
  router.num_threads = options.num_threads;
  return Router::create(router);
}

Status check_tensors(const MoeLayerSpec& spec, const MoeLayerTensors& t) {
  const std::int64_t columns = spec.routing.num_experts + spec.routing.num_zero_experts;
  MOESAIC_RETURN_IF_ERROR(check_present("gate_weight", t.gate_weight, true));
  MOESAIC_RETURN_IF_ERROR(
      expect_shape("gate_weight", t.gate_weight.view(), {columns, spec.hidden_size}));
  MOESAIC_RETURN_IF_ERROR(check_present("gate_bias", t.gate_bias, spec.has_router_bias));
  MOESAIC_RETURN_IF_ERROR(check_present("e_score_correction_bias", t.e_score_correction_bias,
                                        spec.routing.has_correction_bias));
  const bool shared = spec.shared.intermediate_size > 0;
  MOESAIC_RETURN_IF_ERROR(check_present("shared_w13", t.shared_w13, shared));
  MOESAIC_RETURN_IF_ERROR(check_present("shared_w2", t.shared_w2, shared));
  MOESAIC_RETURN_IF_ERROR(
      check_present("shared_gate_weight", t.shared_gate_weight, spec.shared.gated_output));
  if (!spec.shared.gated_output) return {};
  return expect_shape("shared_gate_weight", t.shared_gate_weight.view(), {1, spec.hidden_size});
}

// What ModularKernel will allocate for a backend that writes straight into the output.
Result<std::int64_t> kernel_workspace(const ExpertsBackend& backend, const MoeProblem& problem) {
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<PrepareAndFinalize> pf,
                           make_local_prepare_finalize(problem));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t prepare, pf->workspace_size(problem.max_tokens));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t experts,
                           backend.workspace_size(problem, problem.max_tokens));
  Arena arena = Arena::measure();
  arena.take<std::byte>(prepare);
  arena.take<std::byte>(experts);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return arena.used();
}

std::string determinism_text(std::string_view routed, std::string_view routed_determinism,
                             std::string_view shared, std::string_view shared_determinism) {
  std::string text = fmt::format(
      "bit-identical for any batch, split, row order and thread count; experts ({}): {}", routed,
      routed_determinism);
  if (!shared.empty()) {
    text += fmt::format("; shared experts ({}): {}", shared, shared_determinism);
  }
  return text;
}

Status with_stage(const Status& status, std::string_view stage) {
  return status.ok() ? status : status.with_context(stage);
}

}  // namespace

Result<FusedMoE> FusedMoE::from_checkpoint(const Checkpoint& checkpoint, int layer,
                                           const Options& options) {
  MOESAIC_ASSIGN_OR_RETURN(MoeLayerWeights weights,
                           checkpoint.load_layer(layer, options.parallel, options.progress));
  return create(std::move(weights), options);
}

Result<FusedMoE> FusedMoE::create(MoeLayerWeights weights, const Options& options) {
  const MoeLayerTensors& t = weights.tensors;
  if (!weights.experts) {
    return Status(StatusCode::kInvalidArgument, "experts: got no source, need one");
  }
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl);
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  impl->spec = weights.spec;
  impl->options = options;
  MOESAIC_ASSIGN_OR_RETURN(impl->plan, plan_fused_moe(weights.spec, t.shared_quant, options));
  MOESAIC_RETURN_IF_ERROR(check_tensors(weights.spec, t));

  Result<GateLinear> gate = make_gate(t.gate_weight, t.gate_bias, options.num_threads);
  if (!gate.ok()) return with_stage(gate.status(), "gate");
  impl->gate.emplace(std::move(gate).value());
  impl->small_bytes = t.gate_weight.bytes() + t.shared_gate_weight.bytes();
  Result<Router> router = make_router(impl->plan, options, t.e_score_correction_bias.view());
  if (!router.ok()) return with_stage(router.status(), "router");
  impl->router.emplace(std::move(router).value());
  if (impl->router->slots() != impl->plan.routed.top_k) {
    return Status(StatusCode::kInternal, "router: slots differ from top_k");
  }

  Result<ModularKernel> kernel = make_kernel(impl->plan.routed, impl->plan.quant, *weights.experts,
                                             options.backend, /*shared=*/false);
  if (!kernel.ok()) return with_stage(kernel.status(), "experts");
  impl->kernel.emplace(std::move(kernel).value());
  if (impl->plan.has_shared) {
    const auto source = make_stacked_source({t.shared_w13.view(),
                                             t.shared_w13_scale.view(),
                                             {},
                                             t.shared_w2.view(),
                                             t.shared_w2_scale.view(),
                                             {}});
    Result<ModularKernel> shared = make_kernel(impl->plan.shared, impl->plan.shared_quant, *source,
                                               options.backend, /*shared=*/true);
    if (!shared.ok()) return with_stage(shared.status(), "shared_experts");
    impl->shared.emplace(std::move(shared).value());
    if (weights.spec.shared.gated_output) {
      Result<GateLinear> shared_gate =
          make_gate(t.shared_gate_weight, Tensor(), options.num_threads);
      if (!shared_gate.ok()) return with_stage(shared_gate.status(), "shared_experts gate");
      impl->shared_gate.emplace(std::move(shared_gate).value());
    }
  }
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const Impl::Buffers unused, impl->carve(arena, options.max_tokens));
  static_cast<void>(unused);
  MOESAIC_ASSIGN_OR_RETURN(impl->workspace, Tensor::uninitialized(DType::kU8, {arena.used()}));
  impl->options.progress = nullptr;  // loading is over
  return FusedMoE(std::move(impl));
}

Result<FusedMoE::Impl::Buffers> FusedMoE::Impl::carve(Arena& arena, std::int64_t rows) const {
  // Products below stay under 2^63: rows < 2^31, columns < 2^31.
  Buffers b;
  b.logits = arena.take<float>(rows * logit_columns());
  b.topk_weights = arena.take<float>(rows * plan.routed.top_k);
  b.topk_ids = arena.take<std::int32_t>(rows * plan.routed.top_k);
  if (options.routed_input_transform) {
    b.latent = arena.take<std::byte>(rows * plan.latent_size * kMaxElementBytes);
  }
  if (!writes_output_directly()) b.routed = arena.take<float>(rows * plan.latent_size);
  if (options.routed_output_transform) b.routed_back = arena.take<float>(rows * plan.hidden_size);
  if (plan.has_shared) {
    b.shared = arena.take<float>(rows * plan.hidden_size);
    b.shared_gate = arena.take<float>(rows);
    b.ones = arena.take<float>(rows);
    b.zeros = arena.take<std::int32_t>(rows);
  }
  if (spec.routing.num_zero_experts > 0) {
    b.zero_experts = arena.take<std::byte>(rows * plan.hidden_size * kMaxElementBytes);
  }
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return b;
}

Status FusedMoE::Impl::check(const ConstTensorView& x, const TensorView& output,
                             const Trace& trace) const {
  if (x.rank() != 2 || x.dim(1) != plan.hidden_size) {
    return {StatusCode::kInvalidShape, fmt::format("hidden_states: got {}, need [M, {}]",
                                                   x.shape.to_string(), plan.hidden_size)};
  }
  for (const auto& [field, dtype] :
       {std::pair{"hidden_states", x.dtype}, std::pair{"output", output.dtype}}) {
    if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
      return {StatusCode::kInvalidDType,
              fmt::format("{}: got {}, need F32, BF16 or F16", field, dtype_name(dtype))};
    }
  }
  const std::int64_t rows = x.dim(0);
  MOESAIC_RETURN_IF_ERROR(expect_shape("output", output, {rows, plan.hidden_size}));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("output", output));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t input_bytes,
                           strided_extent_bytes("hidden_states", x));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t output_bytes,
                           contiguous_bytes(output.dtype, output.shape));
  MOESAIC_RETURN_IF_ERROR(
      expect_disjoint("output", output.data, output_bytes, "hidden_states", x.data, input_bytes));
  const std::int64_t k = plan.routed.top_k;
  MOESAIC_RETURN_IF_ERROR(check_trace("trace.router_logits", trace.router_logits, DType::kF32,
                                      {rows, logit_columns()}));
  MOESAIC_RETURN_IF_ERROR(
      check_trace("trace.topk_weights", trace.topk_weights, DType::kF32, {rows, k}));
  return check_trace("trace.topk_ids", trace.topk_ids, DType::kI32, {rows, k});
}

Status FusedMoE::Impl::route(const ConstTensorView& x, const Buffers& b, const Trace& trace) const {
  const std::int64_t rows = x.dim(0);
  const std::int64_t k = plan.routed.top_k;
  const TensorView logits = view_of(b.logits, DType::kF32, {rows, logit_columns()});
  MOESAIC_RETURN_IF_ERROR(with_stage(gate->forward(x, logits), "gate"));
  Router::Args r;
  r.hidden_states = x;
  r.router_logits = logits;
  r.topk_weights = view_of(b.topk_weights, DType::kF32, {rows, k});
  r.topk_ids = view_of(b.topk_ids, DType::kI32, {rows, k});
  if (spec.routing.num_zero_experts > 0) {
    r.zero_expert_output = view_of(b.zero_experts, DType::kF32, {rows, plan.hidden_size});
  }
  MOESAIC_RETURN_IF_ERROR(with_stage(router->select_experts(r), "router"));
  const auto report = [](const TensorView& to, const void* from) {
    if (!to.present()) return;
    std::memcpy(to.data, from, static_cast<std::size_t>(to.dim(0) * to.dim(1)) * sizeof(float));
  };
  report(trace.router_logits, b.logits);
  report(trace.topk_weights, b.topk_weights);
  report(trace.topk_ids, b.topk_ids);
  return {};
}

Status FusedMoE::Impl::run_routed(const ConstTensorView& x, const Buffers& b,
                                  const TensorView& output) const {
  const std::int64_t rows = x.dim(0);
  ConstTensorView input = x;
  if (options.routed_input_transform) {
    const TensorView latent = view_of(b.latent, x.dtype, {rows, plan.latent_size});
    MOESAIC_RETURN_IF_ERROR(
        with_stage(options.routed_input_transform(x, latent), "routed_input_transform"));
    input = latent;
  }
  ModularKernel::Args a;
  a.hidden_states = input;
  a.topk_weights = view_of(b.topk_weights, DType::kF32, {rows, plan.routed.top_k});
  a.topk_ids = view_of(b.topk_ids, DType::kI32, {rows, plan.routed.top_k});
  a.expert_map = plan.expert_map;
  if (MOESAIC_FAULT(layer_router_weights_of_one)) {
    std::fill(b.topk_weights, b.topk_weights + rows * plan.routed.top_k, 1.0F);
  }
  a.output =
      writes_output_directly() ? output : view_of(b.routed, DType::kF32, {rows, plan.latent_size});
  MOESAIC_RETURN_IF_ERROR(with_stage(kernel->run(a), "experts"));
  if (!options.routed_output_transform) return {};
  // A transform need not be linear: the factor acts before it.
  for (std::int64_t i = 0; i < rows * plan.latent_size; ++i) b.routed[i] *= plan.output_scale;
  return with_stage(options.routed_output_transform(
                        view_of(b.routed, DType::kF32, {rows, plan.latent_size}),
                        view_of(b.routed_back, DType::kF32, {rows, plan.hidden_size})),
                    "routed_output_transform");
}

Status FusedMoE::Impl::run_shared(const ConstTensorView& x, const Buffers& b) const {
  if (!shared) return {};
  const std::int64_t rows = x.dim(0);
  std::fill(b.ones, b.ones + rows, 1.0F);
  std::fill(b.zeros, b.zeros + rows, 0);
  ModularKernel::Args a;
  a.hidden_states = x;
  a.topk_weights = view_of(b.ones, DType::kF32, {rows, 1});
  a.topk_ids = view_of(b.zeros, DType::kI32, {rows, 1});
  a.output = view_of(b.shared, DType::kF32, {rows, plan.hidden_size});
  MOESAIC_RETURN_IF_ERROR(with_stage(shared->run(a), "shared_experts"));
  // From here on `ones` holds the factor of the shared result.
  if (!shared_gate || MOESAIC_FAULT(layer_ignore_shared_gate)) return {};
  MOESAIC_RETURN_IF_ERROR(
      with_stage(shared_gate->forward(x, view_of(b.shared_gate, DType::kF32, {rows, 1})),
                 "shared_experts gate"));
  for (std::int64_t t = 0; t < rows; ++t) b.ones[t] = 1.0F / (1.0F + std::exp(-b.shared_gate[t]));
  return {};
}

void FusedMoE::Impl::combine(const ConstTensorView& x, const Buffers& b,
                             const TensorView& output) const {
  const std::int64_t hidden = plan.hidden_size;
  const float* routed = options.routed_output_transform ? b.routed_back : b.routed;
  float scale = options.routed_output_transform ? 1.0F : plan.output_scale;
  if (MOESAIC_FAULT(layer_scale_twice)) {
    scale *= static_cast<float>(spec.routing.routed_scaling_factor);
  }
  const bool add_shared = shared.has_value() && !MOESAIC_FAULT(layer_omit_shared);
  for (std::int64_t t = 0; t < x.dim(0); ++t) {
    for (std::int64_t i = t * hidden; i < (t + 1) * hidden; ++i) {
      float sum = scale * routed[i];
      if (add_shared) sum += b.ones[t] * b.shared[i];
      if (plan.has_zero_experts) sum += load_as_f32(b.zero_experts, DType::kF32, i);
      store_from_f32(output.data, output.dtype, i, sum);
    }
  }
}

Status FusedMoE::Impl::forward_chunk(const ConstTensorView& x, const TensorView& output,
                                     const Trace& trace) const {
  Arena arena(
      {const_cast<std::byte*>(workspace.data()), static_cast<std::size_t>(workspace.bytes())});
  MOESAIC_ASSIGN_OR_RETURN(const Buffers b, carve(arena, x.dim(0)));
  MOESAIC_RETURN_IF_ERROR(route(x, b, trace));
  MOESAIC_RETURN_IF_ERROR(run_routed(x, b, output));
  MOESAIC_RETURN_IF_ERROR(run_shared(x, b));
  if (!writes_output_directly()) combine(x, b, output);
  return {};
}

Status FusedMoE::forward(ConstTensorView hidden_states, TensorView output,
                         const Trace& trace) const {
  const Impl& m = *impl_;
  MOESAIC_RETURN_IF_ERROR(m.check(hidden_states, output, trace));
  const std::lock_guard<std::mutex> lock(m.mutex);
  const std::int64_t rows = hidden_states.dim(0);
  for (std::int64_t first = 0; first < rows; first += m.options.max_tokens) {
    const std::int64_t count = std::min(m.options.max_tokens, rows - first);
    Trace part;
    if (trace.router_logits.present()) {
      part.router_logits = rows_of(trace.router_logits, first, count);
    }
    if (trace.topk_weights.present()) part.topk_weights = rows_of(trace.topk_weights, first, count);
    if (trace.topk_ids.present()) part.topk_ids = rows_of(trace.topk_ids, first, count);
    MOESAIC_RETURN_IF_ERROR(
        m.forward_chunk(rows_of(hidden_states, first, count), rows_of(output, first, count), part));
  }
  return {};
}

FusedMoE::FusedMoE(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
FusedMoE::FusedMoE(FusedMoE&&) noexcept = default;
FusedMoE& FusedMoE::operator=(FusedMoE&&) noexcept = default;
FusedMoE::~FusedMoE() = default;

const MoeLayerSpec& FusedMoE::spec() const { return impl_->spec; }
const QuantScheme& FusedMoE::quant() const { return impl_->plan.quant.scheme; }
std::string FusedMoE::experts_backend() const {
  return std::string(impl_->kernel->experts().name());
}
std::int64_t FusedMoE::workspace_bytes() const {
  return impl_->workspace.bytes() + impl_->kernel->workspace_bytes() +
         (impl_->shared ? impl_->shared->workspace_bytes() : 0);
}
std::int64_t FusedMoE::weight_bytes() const {
  return impl_->small_bytes + impl_->kernel->experts().weight_bytes() +
         (impl_->shared ? impl_->shared->experts().weight_bytes() : 0);
}
std::vector<CandidateReport> FusedMoE::explain() const {
  return explain_plan(impl_->plan, impl_->router->name());
}
std::string FusedMoE::determinism() const {
  const Experts* shared = impl_->shared ? &impl_->shared->experts() : nullptr;
  return determinism_text(experts_backend(), impl_->kernel->experts().determinism(),
                          shared != nullptr ? shared->name() : std::string_view(),
                          shared != nullptr ? shared->determinism() : std::string_view());
}

Result<LayerExplanation> explain_layer(const MoeLayerSpec& spec, const FusedMoE::Options& options) {
  MOESAIC_ASSIGN_OR_RETURN(FusedPlan plan, plan_fused_moe(spec, spec.quant, options));
  // The router's name needs the shape of its bias, not its values.
  Tensor bias;
  if (spec.routing.has_correction_bias) {
    MOESAIC_ASSIGN_OR_RETURN(bias, Tensor::zeros(DType::kF32, {spec.routing.num_experts +
                                                               spec.routing.num_zero_experts}));
  }
  const Result<Router> router = make_router(plan, options, bias.view());
  if (!router.ok()) return with_stage(router.status(), "router");
  LayerExplanation explanation;
  explanation.candidates = explain_plan(plan, router->name());

  const Result<const ExpertsBackend*> routed = choose_backend(plan.routed, options.backend, false);
  if (!routed.ok()) return with_stage(routed.status(), "experts");
  explanation.experts_backend = std::string((*routed)->name);
  MOESAIC_ASSIGN_OR_RETURN(explanation.workspace_bytes, kernel_workspace(**routed, plan.routed));
  std::string_view shared_name, shared_determinism;
  if (plan.has_shared) {
    const Result<const ExpertsBackend*> shared = choose_backend(plan.shared, options.backend, true);
    if (!shared.ok()) return with_stage(shared.status(), "shared_experts");
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, kernel_workspace(**shared, plan.shared));
    explanation.workspace_bytes += bytes;
    shared_name = (*shared)->name;
    shared_determinism = (*shared)->determinism;
  }
  explanation.determinism = determinism_text(explanation.experts_backend, (*routed)->determinism,
                                             shared_name, shared_determinism);
  FusedMoE::Impl impl;
  impl.spec = spec;
  impl.options = options;
  impl.plan = std::move(plan);
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const FusedMoE::Impl::Buffers unused,
                           impl.carve(arena, options.max_tokens));
  static_cast<void>(unused);
  explanation.workspace_bytes += arena.used();
  return explanation;
}

}  // namespace moesaic
