// What explain shows of a layer on a CPU: candidates of the stages, backend, workspace, threads.
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/refusal.h"
#include "cpu/team.h"
#include "cpu/tiers.h"
#include "gate/cpu/gate.h"
#include "layer/cpu/engine.h"
#include "moesaic/communicator.h"
#include "moesaic/numerics.h"
#include "router/route_row.h"

namespace moesaic::layer {
namespace {

// threads_of(tokens) never shrinks with more tokens.
template <class ThreadsOf>
StageThreads stage_threads(std::string stage, std::int64_t max_tokens, ThreadsOf&& threads_of) {
  std::int64_t one = 0, many = max_tokens + 1;  // tokens known to use one thread, more threads
  while (many - one > 1) {
    const std::int64_t middle = one + (many - one) / 2;
    (threads_of(middle) == 1 ? one : many) = middle;
  }
  return {std::move(stage), threads_of(max_tokens), one};
}

StageThreads experts_threads(std::string stage, const MoeProblem& problem, std::int64_t max_tokens,
                             const ExpertsBackend& backend) {
  return stage_threads(std::move(stage), max_tokens,
                       [&](std::int64_t tokens) { return backend.threads(problem, tokens); });
}

//   shared  null: this rank has no shared experts
std::vector<StageThreads> all_threads(const FusedPlan& plan, std::int64_t max_tokens,
                                      const ExpertsBackend& routed, const ExpertsBackend* shared) {
  const int threads = cpu::resolve_threads(plan.routed.num_threads);
  const std::int64_t columns = logit_columns(plan);
  std::vector<StageThreads> stages;
  if (plan.has_gate) {
    stages.push_back(stage_threads("gate", max_tokens, [&](std::int64_t tokens) {
      return cpu::team_size(gate::cpu_gate_us(tokens, columns, plan.hidden_size), threads);
    }));
  }
  stages.push_back(stage_threads("router", max_tokens, [&](std::int64_t tokens) {
    return cpu::team_size(router::route_rows_us(tokens, columns), threads);
  }));
  stages.push_back(experts_threads("experts", plan.routed, max_tokens, routed));
  if (shared != nullptr) {
    stages.push_back(experts_threads("shared_experts", plan.shared, max_tokens, *shared));
  }
  return stages;
}

// What ModularKernel will allocate for a backend that writes straight into the output.
Result<std::int64_t> kernel_workspace(const ExpertsBackend& backend, const MoeProblem& problem) {
  const bool standard = problem.format == ActivationFormat::kStandard;
  MOESAIC_ASSIGN_OR_RETURN(
      const std::unique_ptr<PrepareAndFinalize> pf,
      standard ? make_local_prepare_finalize(problem) : make_batched_prepare_finalize(problem));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t prepare, pf->workspace_size(problem.max_tokens));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t experts,
                           backend.workspace_size(problem, problem.max_tokens));
  Arena arena = Arena::measure();
  arena.take<std::byte>(prepare);
  arena.take<std::byte>(experts);
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return arena.used();
}

// The rule of the order in which stages run, as a list. Shared experts run while the results of the
// routed ones travel, where some do; else behind them, before the collective that adds up ranks.
std::string cpu_stage_order(const FusedPlan& plan, const FusedMoE::Options& options) {
  const bool travels = plan.ranks.active && plan.ranks.transport != RankTransport::kNone;
  const bool meanwhile = travels && plan.adds_shared && options.ranks.communicator->overlaps();
  std::string order = plan.has_gate ? "gate, router" : "router";
  if (travels) order += ", dispatch";
  order += ", experts";
  if (travels) order += ", combine";
  if (plan.adds_shared) order += meanwhile ? " (shared_experts meanwhile)" : ", shared_experts";
  if (plan.ranks.active && plan.ranks.replicas > 1)
    order += ", exchange with ranks of the same rows";
  if (plan.ranks.in_flight == 2) {
    order += fmt::format(
        "; from {} tokens on two batches at once: dispatch of both, experts of both, then the rest",
        options.ranks.dual_batch_tokens);
  }
  return order;
}

// Weight-only is the default: what the int8 scheme of the same weights is about, or, where that is in
// force, what it is instead of.
std::string int8_choice(const Scheme& scheme, std::int64_t intermediate_size) {
  const std::string_view name = int8_group_scheme_of(scheme.weight);
  const bool in_force = scheme.kind == ComputeScheme::kInt8Group;
  if (name.empty() || !(in_force || scheme.weight_only())) return {};
  const Result<Scheme> named = quant_scheme_from_name(name);
  const Result<const cpu::CpuKernels*> kernels = cpu::current_kernels();
  if (!named.ok() || !kernels.ok()) return {};
  const Scheme int8 = with_stored_weight(*named, scheme.weight, scheme.forms);
  OperandQuant plain;  // BF16
  const double cost = activation_bound(int8.activation, intermediate_size);
  const double bound = activation_bound(plain, intermediate_size);
  const bool integers = (*kernels)->grouped_gemm_i8[cpu::WeightKind::kI8Quads] != nullptr;
  return fmt::format(
      "{}{} quantises activations ({}): bound {:.1e} {} of {:.1e} with BF16; {}",
      in_force ? "" : "--quant ", name, activation_text(int8), cost,
      in_force ? "in the place" : "would be in the place", bound,
      integers ? "products are integers, faster the more rows an expert has, with the same weights "
                 "in memory"
               : "no faster here, this machine or tier lacks the 8-bit dot product");
}

}  // namespace

Result<const ExpertsBackend*> choose_layer_experts(const MoeProblem& problem,
                                                   const std::string& forced, bool shared) {
  Result<const ExpertsBackend*> row = choose_experts(problem, forced);
  if (!row.ok() && shared && row.status().code() == StatusCode::kUnsupported) {
    row = choose_experts(problem);
  }
  return row;
}

void append_cpu_candidates(ExplainStage stage, const FusedPlan& plan, std::string_view router_name,
                           Device device, std::vector<CandidateReport>& rows) {
  switch (stage) {
    case ExplainStage::kGate:
      for (const cpu::TierInfo& tier : cpu::cpu_tiers()) {
        const Status own = cpu::usable_kernels(tier.name).status();
        const Status here = own.ok() ? expect_cpu(device) : own;
        rows.push_back({"gate", fmt::format("cpu_{}", tier.name), here.message(), here.ok()});
      }
      return;
    case ExplainStage::kRouter: {
      const Status here = expect_cpu(device);
      rows.push_back({"router", std::string(router_name), here.message(), here.ok()});
      return;
    }
    case ExplainStage::kPrepareFinalize:
      for (CandidateReport& row : explain_prepare_finalize(plan.routed, plan.ranks.parallel)) {
        rows.push_back(std::move(row));
      }
      return;
  }
}

Status explain_cpu_engine(const FusedPlan& plan, const MoeLayerSpec&,
                          const FusedMoE::Options& options, LayerExplanation& explanation) {
  MOESAIC_RETURN_IF_ERROR(cpu::current_kernels().status());  // of gate and transport, too
  const Result<const ExpertsBackend*> routed =
      choose_layer_experts(plan.routed, options.backend, false);
  if (!routed.ok()) return routed.status().with_context("experts");
  explanation.experts_backend = std::string((*routed)->name);
  MOESAIC_ASSIGN_OR_RETURN(explanation.workspace_bytes, kernel_workspace(**routed, plan.routed));
  explanation.workspace_bytes *= plan.ranks.in_flight;
  explanation.stage_order = cpu_stage_order(plan, options);
  explanation.quant_choice = int8_choice(plan.routed.quant, plan.routed.intermediate_size);
  const ExpertsBackend* own = nullptr;
  if (plan.has_shared) {
    const Result<const ExpertsBackend*> shared =
        choose_layer_experts(plan.shared, options.backend, true);
    if (!shared.ok()) return shared.status().with_context("shared_experts");
    own = *shared;
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, kernel_workspace(*own, plan.shared));
    explanation.workspace_bytes += bytes;
  }
  explanation.determinism = layer_determinism(
      (*routed)->name, (*routed)->determinism, own != nullptr ? own->name : std::string_view(),
      own != nullptr ? own->determinism : std::string_view());
  explanation.threads = all_threads(plan, options.max_tokens, **routed, own);
  Arena arena = Arena::measure();
  MOESAIC_ASSIGN_OR_RETURN(const CpuBuffers unused,
                           CpuBuffers::carve(plan, options, plan.ranks.batch_rows, arena));
  static_cast<void>(unused);
  explanation.workspace_bytes += arena.used() * plan.ranks.in_flight;
  return {};
}

}  // namespace moesaic::layer
