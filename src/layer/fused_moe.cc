#include "moesaic/fused_moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "core/arena.h"
#include "cpu/tiers.h"
#include "experts/problem_checks.h"
#include "experts/sm90/experts.h"
#include "layer/fused_impl.h"
#include "layer/load_sources.h"
#include "router/router_checks.h"

namespace moesaic {
namespace {

Status check_present(std::string_view field, const Tensor& t, bool wanted) {
  if (t.present() == wanted) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: got {}, the layer's spec needs {}", field,
                      t.present() ? t.shape().to_string() : "none", wanted ? "one" : "none")};
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

//   pf  null: rows stay where they are
//   max_tokens  rows of one call of the kernel
Result<ModularKernel> make_kernel(const MoeProblem& problem, const QuantPlan& quant,
                                  ExpertSource& source, const std::string& forced, bool shared,
                                  std::unique_ptr<PrepareAndFinalize> pf, std::int64_t max_tokens) {
  MOESAIC_ASSIGN_OR_RETURN(const ExpertsBackend* row, choose_backend(problem, forced, shared));
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<ExpertSource> converted,
                           make_converting_source(source, quant));
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<Experts> experts, row->create(problem, *converted));
  if (!pf) {
    MOESAIC_ASSIGN_OR_RETURN(pf, make_local_prepare_finalize(problem));
  }
  ModularKernel::Options kernel_options;
  kernel_options.max_tokens = max_tokens;
  if (problem.format == ActivationFormat::kBatched) {
    kernel_options.max_tokens_per_expert = problem.max_tokens;
  }
  return ModularKernel::create(problem, std::move(pf), std::move(experts), kernel_options);
}

Result<GateLinear> make_gate(const Tensor& weight, const Tensor& bias, int num_threads) {
  // Logits in fp32 whatever the weight's dtype: a bf16 rounding could flip near-ties.
  GateLinear::Options options;
  options.logits_dtype = DType::kF32;
  options.num_threads = num_threads;
  return GateLinear::create(weight.view(), bias.view(), options);
}

Result<Router> make_router(const FusedPlan& plan, const FusedMoE::Options& options,
                           const ConstTensorView& correction_bias,
                           const ConstTensorView& expert_scale) {
  Router::Options router;
  router.spec = plan.routing;
  router.correction_bias = correction_bias;
  router.expert_scale = expert_scale;
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
  MOESAIC_RETURN_IF_ERROR(
      check_present("expert_scale", t.expert_scale, spec.routing.has_expert_scale));
  const bool norm = spec.input_norm_eps > 0;
  MOESAIC_RETURN_IF_ERROR(check_present("experts_norm_weight", t.experts_norm_weight, norm));
  if (norm) {
    const ConstTensorView weight = t.experts_norm_weight.view();
    MOESAIC_RETURN_IF_ERROR(expect_shape("experts_norm_weight", weight, {spec.hidden_size}));
    MOESAIC_RETURN_IF_ERROR(expect_dtype("experts_norm_weight", weight, DType::kF32));
  }
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

std::string cuda_determinism_text(const FusedPlan& plan) {
  return determinism_text(cuda::kCudaExpertsName, cuda::kCudaExpertsDeterminism,
                          plan.has_shared ? cuda::kCudaExpertsName : std::string_view(),
                          plan.has_shared ? cuda::kCudaExpertsDeterminism : std::string_view());
}

Result<std::string> name_of_router(const FusedPlan& plan) {
  MOESAIC_ASSIGN_OR_RETURN(const RoutingSpec spec, effective_routing(plan.routing));
  return router_name(spec, {});
}

}  // namespace

Result<FusedMoE> FusedMoE::from_checkpoint(const Checkpoint& checkpoint, int layer,
                                           const Options& options) {
  Result<MoeLayerWeights> weights = checkpoint.load_layer(
      layer, options.enable_eplb ? ParallelConfig() : options.parallel, options.progress);
  if (!weights.ok()) {
    // The others wait in create.
    return options.communicator ? agree(*options.communicator, "layer", weights.status(), 0)
                                : weights.status();
  }
  return create(std::move(weights).value(), options);
}

Result<FusedMoE> FusedMoE::create(MoeLayerWeights weights, const Options& options) {
  Result<std::unique_ptr<Impl>> impl = Impl::build(std::move(weights), options);
  if (options.communicator) {
    const std::int64_t value = impl.ok() ? (*impl)->fingerprint() : 0;
    MOESAIC_RETURN_IF_ERROR(
        agree(*options.communicator, "layer", impl.ok() ? Status() : impl.status(), value));
  }
  if (!impl.ok()) return impl.status();
  return FusedMoE(std::move(impl).value());
}

std::int64_t FusedMoE::Impl::fingerprint() const {
  return fingerprint_of(
      fmt::format("{} {} {} {} {} {} {} {} {} {}", spec.hidden_size, spec.intermediate_size,
                  spec.num_experts, plan.routing.top_k, plan.latent_size, plan.quant.scheme.name,
                  options.max_tokens, rank_transport_name(plan.ranks.transport),
                  plan.ranks.per_slot, expert_placement_name(options.parallel.placement)) +
      fmt::format(" {} {} {} {} {}", options.enable_eplb, plan.routed.num_experts,
                  options.enable_eplb ? kernel->experts().name() : "", options.device.is_cuda(),
                  dtype_name(plan.ranks.combine_dtype)));
}

Result<std::unique_ptr<FusedMoE::Impl>> FusedMoE::Impl::build(MoeLayerWeights weights,
                                                              const Options& options) {
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

  impl->plan.gate_dtype = t.gate_weight.dtype();
  if (options.device.is_cuda()) {
    MOESAIC_RETURN_IF_ERROR(check_device(options.device));
    if (impl->plan.ranks.active) {
      MOESAIC_ASSIGN_OR_RETURN(impl->mesh, RankMesh::create(options, impl->plan.ranks));
    }
    MOESAIC_ASSIGN_OR_RETURN(impl->cuda, cuda::CudaLayer::create(weights.spec, impl->plan, options,
                                                                 weights, impl->mesh.get()));
  } else {
    MOESAIC_RETURN_IF_ERROR(impl->build_stages(weights));
  }
  MOESAIC_ASSIGN_OR_RETURN(impl->router_name, name_of_router(impl->plan));
  impl->options.progress = nullptr;  // loading is over
  return impl;
}

Status FusedMoE::Impl::build_stages(MoeLayerWeights& weights) {
  const MoeLayerTensors& t = weights.tensors;
  Result<GateLinear> made_gate = make_gate(t.gate_weight, t.gate_bias, options.num_threads);
  if (!made_gate.ok()) return made_gate.status().with_context("gate");
  gate.emplace(std::move(made_gate).value());
  small_bytes = t.gate_weight.bytes() + t.shared_gate_weight.bytes();
  if (plan.input_norm_eps > 0) {
    experts_norm_weight = std::move(weights.tensors.experts_norm_weight);
    small_bytes += experts_norm_weight.bytes();
  }
  Result<Router> made_router =
      make_router(plan, options, t.e_score_correction_bias.view(), t.expert_scale.view());
  if (!made_router.ok()) return made_router.status().with_context("router");
  router.emplace(std::move(made_router).value());
  if (router->slots() != plan.routing.top_k) {
    return {StatusCode::kInternal, "router: slots differ from top_k"};
  }
  MOESAIC_RETURN_IF_ERROR(build_routed(*weights.experts));
  MOESAIC_RETURN_IF_ERROR(build_shared(t));

  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const Buffers unused, carve(arena, options.max_tokens));
  static_cast<void>(unused);
  MOESAIC_ASSIGN_OR_RETURN(workspace, Tensor::uninitialized(DType::kU8, {arena.used()}));
  return {};
}

Status FusedMoE::Impl::build_routed(ExpertSource& source) {
  std::unique_ptr<PrepareAndFinalize> pf;
  if (plan.ranks.active) {
    MOESAIC_ASSIGN_OR_RETURN(mesh, RankMesh::create(options, plan.ranks));
    MOESAIC_ASSIGN_OR_RETURN(pf, mesh->make_prepare_finalize(plan.routed, options.parallel));
  }
  QuantPlan quant = plan.quant;
  ExpertSource* from = &source;
  std::unique_ptr<ExpertStore> store;
  if (options.enable_eplb) {
    // Kept as the backend takes them, so that they are converted once.
    MOESAIC_ASSIGN_OR_RETURN(const auto converted, make_converting_source(source, plan.quant));
    MOESAIC_ASSIGN_OR_RETURN(
        balancer, ExpertBalancer::create(spec.num_experts, plan.routed.num_experts, plan.ranks.size,
                                         options.parallel.ep_rank, options.eplb_window));
    MOESAIC_ASSIGN_OR_RETURN(store, ExpertStore::load(*converted, balancer->local_experts()));
    quant.conversion = LoadConversion::kNone;
    from = store.get();
  }
  Result<ModularKernel> made = make_kernel(plan.routed, quant, *from, options.backend,
                                           /*shared=*/false, std::move(pf), plan.ranks.kernel_rows);
  if (!made.ok()) return made.status().with_context("experts");
  kernel.emplace(std::move(made).value());
  if (balancer) balancer->set_store(std::move(store));
  if (!plan.ranks.per_slot) return {};
  // The backend's own way of adding a row, so that the bits are those of one rank.
  accumulate = [](const float* src, float weight, std::int64_t n, float* dst) {
    for (std::int64_t i = 0; i < n; ++i) dst[i] += weight * src[i];
  };
  constexpr std::string_view kPrefix = "cpu_";
  const std::string_view name = kernel->experts().name();
  if (!name.starts_with(kPrefix)) return {};
  const Result<const cpu::CpuKernels*> tier = cpu::kernels_by_name(name.substr(kPrefix.size()));
  if (tier.ok()) accumulate = (*tier)->accumulate_row;
  return {};
}

Status FusedMoE::Impl::build_shared(const MoeLayerTensors& t) {
  if (!plan.has_shared) return {};
  const auto source = make_stacked_source({t.shared_w13.view(),
                                           t.shared_w13_scale.view(),
                                           {},
                                           t.shared_w2.view(),
                                           t.shared_w2_scale.view(),
                                           {}});
  Result<ModularKernel> made = make_kernel(plan.shared, plan.shared_quant, *source, options.backend,
                                           /*shared=*/true, nullptr, options.max_tokens);
  if (!made.ok()) return made.status().with_context("shared_experts");
  shared.emplace(std::move(made).value());
  if (!spec.shared.gated_output) return {};
  Result<GateLinear> gate_made = make_gate(t.shared_gate_weight, Tensor(), options.num_threads);
  if (!gate_made.ok()) return gate_made.status().with_context("shared_experts gate");
  shared_gate.emplace(std::move(gate_made).value());
  return {};
}

FusedMoE::FusedMoE(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
FusedMoE::FusedMoE(FusedMoE&&) noexcept = default;
FusedMoE& FusedMoE::operator=(FusedMoE&&) noexcept = default;
FusedMoE::~FusedMoE() = default;

const MoeLayerSpec& FusedMoE::spec() const { return impl_->spec; }
Device FusedMoE::device() const { return impl_->options.device; }
const QuantScheme& FusedMoE::quant() const { return impl_->plan.quant.scheme; }
double FusedMoE::activation_bound() const {
  const FusedPlan& plan = impl_->plan;
  const double routed =
      moesaic::activation_bound(plan.quant.scheme.activation, plan.routed.intermediate_size);
  if (!plan.has_shared) return routed;
  return std::max(routed, moesaic::activation_bound(plan.shared_quant.scheme.activation,
                                                    plan.shared.intermediate_size));
}
std::string FusedMoE::experts_backend() const {
  if (impl_->cuda) return std::string(cuda::kCudaExpertsName);
  return std::string(impl_->kernel->experts().name());
}
std::int64_t FusedMoE::workspace_bytes() const {
  if (impl_->cuda) return impl_->cuda->workspace_bytes();
  return impl_->workspace.bytes() + impl_->kernel->workspace_bytes() +
         (impl_->shared ? impl_->shared->workspace_bytes() : 0);
}
std::int64_t FusedMoE::weight_bytes() const {
  if (impl_->cuda) return impl_->cuda->weight_bytes();
  return impl_->small_bytes + impl_->kernel->experts().weight_bytes() +
         (impl_->shared ? impl_->shared->experts().weight_bytes() : 0) +
         (impl_->balancer ? impl_->balancer->store().bytes() : 0);
}
std::vector<CandidateReport> FusedMoE::explain() const {
  return explain_plan(impl_->plan, impl_->router_name, impl_->options.device);
}
std::string FusedMoE::determinism() const {
  if (impl_->cuda) return cuda_determinism_text(impl_->plan);
  const Experts* shared = impl_->shared ? &impl_->shared->experts() : nullptr;
  return determinism_text(experts_backend(), impl_->kernel->experts().determinism(),
                          shared != nullptr ? shared->name() : std::string_view(),
                          shared != nullptr ? shared->determinism() : std::string_view());
}

RankTransport FusedMoE::transport() const { return impl_->plan.ranks.transport; }
std::int64_t FusedMoE::bytes_sent() const { return impl_->mesh ? impl_->mesh->bytes_sent() : 0; }

Result<LayerExplanation> explain_layer(const MoeLayerSpec& spec, const FusedMoE::Options& options) {
  return explain_layer(MoeLayerFormat{spec, spec.quant, DType::kBF16}, options);
}

Result<LayerExplanation> explain_layer(const MoeLayerFormat& format,
                                       const FusedMoE::Options& options) {
  const MoeLayerSpec& spec = format.spec;
  MOESAIC_ASSIGN_OR_RETURN(FusedPlan plan, plan_fused_moe(spec, format.shared_quant, options));
  plan.gate_dtype = format.gate_dtype;
  // The router's name needs the shapes of its vectors, not their values.
  Tensor bias, expert_scale;
  if (spec.routing.has_expert_scale) {
    MOESAIC_ASSIGN_OR_RETURN(expert_scale, Tensor::zeros(DType::kF32, {spec.num_experts}));
  }
  if (spec.routing.has_correction_bias) {
    MOESAIC_ASSIGN_OR_RETURN(bias, Tensor::zeros(DType::kF32, {spec.routing.num_experts +
                                                               spec.routing.num_zero_experts}));
  }
  const Result<Router> router = make_router(plan, options, bias.view(), expert_scale.view());
  if (!router.ok()) return router.status().with_context("router");
  LayerExplanation explanation;
  explanation.candidates = explain_plan(plan, router->name(), options.device);
  if (options.device.is_cuda()) {
    MOESAIC_RETURN_IF_ERROR(cuda::CudaLayer::can_implement(plan, options));
    Arena gpu = Arena::measure();
    MOESAIC_ASSIGN_OR_RETURN(
        const cuda::LayerWorkspace unused,
        cuda::LayerWorkspace::carve(plan, spec.shared.gated_output, options.max_tokens, gpu));
    static_cast<void>(unused);
    explanation.workspace_bytes = gpu.used();
    explanation.experts_backend = std::string(cuda::kCudaExpertsName);
    explanation.determinism = cuda_determinism_text(plan);
    return explanation;
  }

  const Result<const ExpertsBackend*> routed = choose_backend(plan.routed, options.backend, false);
  if (!routed.ok()) return routed.status().with_context("experts");
  explanation.experts_backend = std::string((*routed)->name);
  MOESAIC_ASSIGN_OR_RETURN(explanation.workspace_bytes, kernel_workspace(**routed, plan.routed));
  std::string_view shared_name, shared_determinism;
  if (plan.has_shared) {
    const Result<const ExpertsBackend*> shared = choose_backend(plan.shared, options.backend, true);
    if (!shared.ok()) return shared.status().with_context("shared_experts");
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, kernel_workspace(**shared, plan.shared));
    explanation.workspace_bytes += bytes;
    shared_name = (*shared)->name;
    shared_determinism = (*shared)->determinism;
  }
  explanation.determinism = determinism_text(explanation.experts_backend, (*routed)->determinism,
                                             shared_name, shared_determinism);
  explanation.threads =
      explain_threads(plan, options.max_tokens, explanation.experts_backend, shared_name);
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
