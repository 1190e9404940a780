// How a CPU engine is made, and what it reports about itself.
#include "layer/cpu/engine.h"

#include <fmt/format.h>

#include <new>
#include <utility>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "cpu/tiers.h"
#include "layer/layer_router.h"
#include "layer/load_sources.h"
#include "layer/slot_source.h"
#include "quant/width_slice.h"

namespace moesaic::layer {
namespace {

//   pf  null: rows stay where they are
//   max_tokens  rows of one call of the kernel
Result<ModularKernel> make_kernel(const MoeProblem& problem, const QuantPlan& quant,
                                  ExpertSource& source, const std::string& forced, bool shared,
                                  std::unique_ptr<PrepareAndFinalize> pf, std::int64_t max_tokens,
                                  int in_flight) {
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
  kernel_options.calls_in_flight = in_flight;
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
  MOESAIC_ASSIGN_OR_RETURN(engine->kernels, cpu::current_kernels());
  engine->num_threads = cpu::resolve_threads(parts.options.num_threads);
  MOESAIC_RETURN_IF_ERROR(engine->build_stages(parts.weights));
  return std::unique_ptr<LayerEngine>(std::move(engine));
}

Status CpuEngine::build_stages(MoeLayerWeights& weights) {
  const MoeLayerTensors& t = weights.tensors;
  small_bytes = t.shared_gate_weight.bytes();
  if (plan.has_gate) {
    Result<GateLinear> made_gate = make_gate(t.gate_weight, t.gate_bias, options.num_threads);
    if (!made_gate.ok()) return made_gate.status().with_context("gate");
    gate = std::make_shared<const GateLinear>(std::move(made_gate).value());
    small_bytes += t.gate_weight.bytes();
  }
  if (plan.input_norm_eps > 0) {
    experts_norm_weight =
        std::make_shared<const Tensor>(std::move(weights.tensors.experts_norm_weight));
    small_bytes += experts_norm_weight->bytes();
  }
  Result<Router> made_router = make_layer_router(plan, options, t);
  if (!made_router.ok()) return made_router.status().with_context("router");
  router = std::make_shared<const Router>(std::move(made_router).value());
  if (router->slots() != plan.routing.top_k) {
    return {StatusCode::kInternal, "router: slots differ from top_k"};
  }
  MOESAIC_RETURN_IF_ERROR(build_routed(*weights.experts));
  MOESAIC_RETURN_IF_ERROR(build_shared(weights.shared.get(), t));
  return build_workspace();
}

Status CpuEngine::build_workspace() {
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const CpuBuffers unused,
                           CpuBuffers::carve(plan, options, plan.ranks.batch_rows, arena));
  static_cast<void>(unused);
  const auto bytes = checked_mul(arena.used(), plan.ranks.in_flight);
  if (!bytes) return {StatusCode::kLimitExceeded, "max_tokens: the workspace exceeds 2^63-1"};
  MOESAIC_ASSIGN_OR_RETURN(workspace, Tensor::uninitialized(DType::kU8, {*bytes}));
  return {};
}

Status CpuEngine::build_routed(ExpertSource& source) {
  std::unique_ptr<PrepareAndFinalize> pf;
  if (plan.ranks.active) {
    MOESAIC_ASSIGN_OR_RETURN(pf, mesh->make_prepare_finalize(plan.routed, options.parallel));
  }
  QuantPlan quant = plan.quant;
  ExpertSource* from = &source;
  std::unique_ptr<ExpertSource> converted;
  std::optional<SlotSource> slots;
  if (options.ranks.enable_eplb) {
    MOESAIC_ASSIGN_OR_RETURN(
        expert_balancer,
        ExpertBalancer::create({spec.num_experts, plan.routed.num_experts, options.parallel.ep_size,
                                options.parallel.ep_rank},
                               options.ranks.eplb_window));
    // Texts of the conversion name the expert, not its slot.
    MOESAIC_ASSIGN_OR_RETURN(converted, make_converting_source(source, plan.quant));
    quant.conversion = LoadConversion::kNone;
    from = &slots.emplace(*converted, expert_balancer->local_experts());
  }
  Result<ModularKernel> made =
      make_kernel(plan.routed, quant, *from, options.backend,
                  /*shared=*/false, std::move(pf), plan.ranks.kernel_rows, plan.ranks.in_flight);
  if (!made.ok()) return made.status().with_context("experts");
  kernel = std::make_unique<ModularKernel>(std::move(made).value());
  return {};
}

Status CpuEngine::build_shared(ExpertSource* source, const MoeLayerTensors& t) {
  if (!plan.has_shared) return {};
  Result<ModularKernel> made = make_kernel(plan.shared, plan.shared_quant, *source, options.backend,
                                           /*shared=*/true, nullptr, options.max_tokens,
                                           /*in_flight=*/1);
  if (!made.ok()) return made.status().with_context("shared_experts");
  shared = std::make_shared<const ModularKernel>(std::move(made).value());
  if (!spec.shared.gated_output) return {};
  Result<GateLinear> gate_made = make_gate(t.shared_gate_weight, Tensor(), options.num_threads);
  if (!gate_made.ok()) return gate_made.status().with_context("shared_experts gate");
  shared_gate = std::make_shared<const GateLinear>(std::move(gate_made).value());
  return {};
}

Result<std::unique_ptr<LayerEngine>> CpuEngine::in_world(const FusedPlan& new_plan,
                                                         const FusedMoE::Options& new_options,
                                                         const RankMesh* new_mesh,
                                                         ExpertSource& source) const {
  if (new_plan.has_shared && !shared) {
    return Status(unsupported(
        "update_expert_map: this rank adds the shared experts in the new world and has not loaded "
        "them; need a communicator, include_shared = false or a new layer"));
  }
  const bool sliced = new_plan.shared_slices > 1 || plan.shared_slices > 1;
  if (shared && sliced &&
      (new_plan.shared_slices != plan.shared_slices ||
       quant::row_sharing(new_options.parallel).rank !=
           quant::row_sharing(options.parallel).rank)) {
    return Status(unsupported(
        fmt::format("update_expert_map: got {} slices of shared experts for {} that were loaded, "
                    "need as many and the same one, or a new layer",
                    new_plan.shared_slices, plan.shared_slices)));
  }
  std::unique_ptr<CpuEngine> engine(new (std::nothrow) CpuEngine());
  if (!engine) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  engine->spec = spec;
  engine->plan = new_plan;
  engine->options = new_options;
  engine->mesh = new_mesh;
  engine->kernels = kernels;
  engine->num_threads = num_threads;
  engine->gate = gate;
  engine->router = router;
  engine->shared = shared;
  engine->shared_gate = shared_gate;
  engine->experts_norm_weight = experts_norm_weight;
  engine->small_bytes = small_bytes;
  MOESAIC_RETURN_IF_ERROR(engine->build_routed(source));
  MOESAIC_RETURN_IF_ERROR(engine->build_workspace());
  if (MOESAIC_FAULT(update_keeps_old_map)) engine->plan.expert_map = plan.expert_map;
  if (engine->expert_balancer) {
    MOESAIC_RETURN_IF_ERROR(engine->expert_balancer->set_recording(expert_balancer->recording()));
  }
  return std::unique_ptr<LayerEngine>(std::move(engine));
}

Result<std::vector<ExpertPart>> CpuEngine::expert_parts() const {
  try {
    return kernel->experts().expert_parts();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "get_expert_weights: cannot allocate the list");
  }
}

Status CpuEngine::enqueue(Stream, const FusedMoE::Args&) const {
  return {StatusCode::kUnsupported, "enqueue: got a layer on the CPU, need one on a GPU"};
}

std::int64_t CpuEngine::workspace_bytes() const {
  return workspace.bytes() + kernel->workspace_bytes() + (shared ? shared->workspace_bytes() : 0);
}
std::int64_t CpuEngine::weight_bytes() const {
  return small_bytes + kernel->experts().weight_bytes() +
         (shared ? shared->experts().weight_bytes() : 0);
}
std::string CpuEngine::determinism() const {
  const Experts& routed = kernel->experts();
  const Experts* own = shared ? &shared->experts() : nullptr;
  return layer_determinism(routed.name(), routed.determinism(),
                           own != nullptr ? own->name() : std::string_view(),
                           own != nullptr ? own->determinism() : std::string_view());
}

}  // namespace moesaic::layer
