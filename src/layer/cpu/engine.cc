// How a CPU engine is made, and what it reports about itself.
#include "layer/cpu/engine.h"

#include <new>
#include <utility>

#include "layer/layer_router.h"
#include "layer/load_sources.h"

namespace moesaic::layer {
namespace {

//   pf  null: rows stay where they are
//   max_tokens  rows of one call of the kernel
Result<ModularKernel> make_kernel(const MoeProblem& problem, const QuantPlan& quant,
                                  ExpertSource& source, const std::string& forced, bool shared,
                                  std::unique_ptr<PrepareAndFinalize> pf, std::int64_t max_tokens) {
  MOESAIC_ASSIGN_OR_RETURN(const ExpertsBackend* row,
                           choose_layer_experts(problem, forced, shared));
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
  // Logits in fp32 whatever the weight's dtype: a bf16 rounding could flip near-ties. Where one is
  // wanted, the layer rounds them.
  GateLinear::Options options;
  options.num_threads = num_threads;
  return GateLinear::create(weight.view(), bias.view(), options);
}

}  // namespace

Result<std::unique_ptr<LayerEngine>> CpuEngine::create(const EngineParts& parts) {
  std::unique_ptr<CpuEngine> engine(new (std::nothrow) CpuEngine());
  if (!engine) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  engine->spec = parts.spec;
  engine->plan = parts.plan;
  engine->options = parts.options;
  engine->options.progress = nullptr;  // loading is over
  engine->mesh = parts.mesh;
  MOESAIC_RETURN_IF_ERROR(engine->build_stages(parts.weights));
  return std::unique_ptr<LayerEngine>(std::move(engine));
}

Status CpuEngine::build_stages(MoeLayerWeights& weights) {
  const MoeLayerTensors& t = weights.tensors;
  small_bytes = t.shared_gate_weight.bytes();
  if (plan.has_gate) {
    Result<GateLinear> made_gate = make_gate(t.gate_weight, t.gate_bias, options.num_threads);
    if (!made_gate.ok()) return made_gate.status().with_context("gate");
    gate.emplace(std::move(made_gate).value());
    small_bytes += t.gate_weight.bytes();
  }
  if (plan.input_norm_eps > 0) {
    experts_norm_weight = std::move(weights.tensors.experts_norm_weight);
    small_bytes += experts_norm_weight.bytes();
  }
  Result<Router> made_router = make_layer_router(plan, options, t);
  if (!made_router.ok()) return made_router.status().with_context("router");
  router.emplace(std::move(made_router).value());
  if (router->slots() != plan.routing.top_k) {
    return {StatusCode::kInternal, "router: slots differ from top_k"};
  }
  MOESAIC_RETURN_IF_ERROR(build_routed(*weights.experts));
  MOESAIC_RETURN_IF_ERROR(build_shared(weights.shared.get(), t));

  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const CpuBuffers unused,
                           CpuBuffers::carve(plan, options, options.max_tokens, arena));
  static_cast<void>(unused);
  MOESAIC_ASSIGN_OR_RETURN(workspace, Tensor::uninitialized(DType::kU8, {arena.used()}));
  return {};
}

Status CpuEngine::build_routed(ExpertSource& source) {
  std::unique_ptr<PrepareAndFinalize> pf;
  if (plan.ranks.active) {
    MOESAIC_ASSIGN_OR_RETURN(pf, mesh->make_prepare_finalize(plan.routed, options.parallel));
  }
  QuantPlan quant = plan.quant;
  ExpertSource* from = &source;
  std::unique_ptr<ExpertStore> store;
  if (options.ranks.enable_eplb) {
    // The store keeps experts as the backend takes them, so that they are converted once.
    MOESAIC_ASSIGN_OR_RETURN(const auto converted, make_converting_source(source, plan.quant));
    MOESAIC_ASSIGN_OR_RETURN(
        expert_balancer,
        ExpertBalancer::create(spec.num_experts, plan.routed.num_experts, plan.ranks.size,
                               options.parallel.ep_rank, options.ranks.eplb_window));
    MOESAIC_ASSIGN_OR_RETURN(store,
                             ExpertStore::load(*converted, expert_balancer->local_experts()));
    quant.conversion = LoadConversion::kNone;
    from = store.get();
  }
  Result<ModularKernel> made = make_kernel(plan.routed, quant, *from, options.backend,
                                           /*shared=*/false, std::move(pf), plan.ranks.kernel_rows);
  if (!made.ok()) return made.status().with_context("experts");
  kernel.emplace(std::move(made).value());
  if (expert_balancer) expert_balancer->set_store(std::move(store));
  return {};
}

Status CpuEngine::build_shared(ExpertSource* source, const MoeLayerTensors& t) {
  if (!plan.has_shared) return {};
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

Result<bool> CpuEngine::continue_rearrange(std::int64_t max_transfers) {
  const auto build = [this](ExpertSource& source) -> Result<std::unique_ptr<Experts>> {
    MOESAIC_ASSIGN_OR_RETURN(const ExpertsBackend* row,
                             choose_experts(plan.routed, kernel->experts().name()));
    return row->create(plan.routed, source);
  };
  MOESAIC_ASSIGN_OR_RETURN(const bool ready,
                           expert_balancer->advance(*mesh->world(), max_transfers, build));
  if (!ready) return false;
  // Weights and maps switch together, between two forward calls; the old weights end here.
  const auto old = kernel->replace_experts(expert_balancer->take_built());
  if (!old.ok()) {
    expert_balancer->drop();
    return old.status();
  }
  expert_balancer->switch_maps();
  return true;
}

Status CpuEngine::enqueue(Stream, const FusedMoE::Args&) const {
  return {StatusCode::kUnsupported, "enqueue: got a layer on the CPU, need one on a GPU"};
}

std::int64_t CpuEngine::workspace_bytes() const {
  return workspace.bytes() + kernel->workspace_bytes() + (shared ? shared->workspace_bytes() : 0);
}
std::int64_t CpuEngine::weight_bytes() const {
  return small_bytes + kernel->experts().weight_bytes() +
         (shared ? shared->experts().weight_bytes() : 0) +
         (expert_balancer ? expert_balancer->store().bytes() : 0);
}
std::string CpuEngine::determinism() const {
  const Experts& routed = kernel->experts();
  const Experts* own = shared ? &shared->experts() : nullptr;
  return layer_determinism(routed.name(), routed.determinism(),
                           own != nullptr ? own->name() : std::string_view(),
                           own != nullptr ? own->determinism() : std::string_view());
}

}  // namespace moesaic::layer
