#include "moesaic/fused_moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "core/fault.h"
#include "core/guarded.h"
#include "cpu/tiers.h"
#include "layer/fused_impl.h"
#include "router/router_checks.h"

namespace moesaic {
namespace {

Status check_present(std::string_view field, const Tensor& t, bool wanted) {
  if (t.present() == wanted) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: got {}, the layer's spec needs {}", field,
                      t.present() ? t.shape().to_string() : "none", wanted ? "one" : "none")};
}

Status check_gate(const MoeLayerSpec& spec, const MoeLayerTensors& t) {
  const std::int64_t columns = spec.routing.num_experts + spec.routing.num_zero_experts;
  if (!t.gate_weight.present()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("gate_weight: got none, need [{}, {}], or include_gate = false and the "
                        "routing with every call",
                        columns, spec.hidden_size)};
  }
  MOESAIC_RETURN_IF_ERROR(
      expect_shape("gate_weight", t.gate_weight.view(), {columns, spec.hidden_size}));
  return check_present("gate_bias", t.gate_bias, spec.has_router_bias);
}

Status check_tensors(const MoeLayerSpec& spec, const MoeLayerTensors& t,
                     const FusedMoE::Options& options) {
  if (options.include_gate) MOESAIC_RETURN_IF_ERROR(check_gate(spec, t));
  const bool hash = spec.routing.method == RoutingMethod::kHash;
  MOESAIC_RETURN_IF_ERROR(check_present("hash_table", t.hash_table, hash));
  if (hash) {
    MOESAIC_RETURN_IF_ERROR(expect_shape("hash_table", t.hash_table.view(),
                                         {spec.hash_vocabulary, spec.routing.top_k}));
  }
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
  const bool gated = spec.shared.gated_output;
  if (gated && !t.shared_gate_weight.present() && !options.include_shared) return {};
  MOESAIC_RETURN_IF_ERROR(check_present("shared_gate_weight", t.shared_gate_weight, gated));
  if (!gated) return {};
  return expect_shape("shared_gate_weight", t.shared_gate_weight.view(), {1, spec.hidden_size});
}

// How rows travel with a prepare/finalize object of this name.
RankTransport transport_of(std::string_view name) {
  if (name.find("gather") != std::string_view::npos) return RankTransport::kGather;
  if (name == "all_to_all_batched") return RankTransport::kBatched;
  return name.find("all_to_all") != std::string_view::npos ? RankTransport::kAllToAll
                                                           : RankTransport::kNone;
}

// Over ranks the transport was chosen before: objects that could serve, but for another one, do not
// run.
void refuse_other_transports(const layer::RankPlan& ranks, std::vector<CandidateReport>& rows) {
  if (!ranks.active) return;
  for (CandidateReport& row : rows) {
    const RankTransport own = transport_of(row.name);
    if (row.stage != "prepare_finalize" || !row.accepted) continue;
    if (own == ranks.transport) {
      // Where windows may turn out to be impossible, messages could serve.
      const bool messages = row.name.find("peer") == std::string::npos;
      if (!messages || ranks.engine != RankEngine::kPeerWindows) continue;
      row.accepted = false;
      row.reason = "rank_engine: got peer_windows, need messages or auto";
      continue;
    }
    row.accepted = MOESAIC_FAULT(layer_explains_every_transport);
    row.reason = fmt::format("transport: got {}, need {}", rank_transport_name(ranks.transport),
                             rank_transport_name(own));
  }
}

// Every stage in order, with the candidates of all engines.
std::vector<CandidateReport> explain_candidates(const layer::FusedPlan& plan,
                                                std::string_view router, Device device) {
  std::vector<CandidateReport> rows;
  for (const layer::ExplainStage stage : {layer::ExplainStage::kGate, layer::ExplainStage::kRouter,
                                          layer::ExplainStage::kPrepareFinalize}) {
    if (stage == layer::ExplainStage::kGate && !plan.has_gate) continue;
    for (const layer::LayerEngineRow& engine : layer::layer_engines()) {
      engine.append_candidates(stage, plan, router, device, rows);
    }
  }
  refuse_other_transports(plan.ranks, rows);
  const auto append_experts = [&](const MoeProblem& problem, std::string_view stage) {
    for (CandidateReport& row : explain_experts(problem)) {
      row.stage = stage;
      rows.push_back(std::move(row));
    }
  };
  append_experts(plan.routed, "experts");
  if (plan.has_shared) append_experts(plan.shared, "shared_experts");
  return rows;
}

Result<std::string> name_of_router(const layer::FusedPlan& plan) {
  MOESAIC_ASSIGN_OR_RETURN(const RoutingSpec spec, router::effective_routing(plan.routing));
  return router::router_name(spec, {});
}

}  // namespace

Result<FusedMoE> FusedMoE::create(MoeLayerWeights weights, const Options& options) {
  Result<std::unique_ptr<Impl>> impl =
      without_exceptions("layer", [&] { return Impl::build(std::move(weights), options); });
  MOESAIC_RETURN_IF_ERROR(Impl::agree(options.ranks.communicator.get(), impl));
  return FusedMoE(std::move(impl).value());
}

Status FusedMoE::Impl::agree(Communicator* world, const Result<std::unique_ptr<Impl>>& made) {
  if (world == nullptr) return made.status();
  const auto facts = without_exceptions("layer", [&]() -> Result<std::vector<layer::Fact>> {
    MOESAIC_RETURN_IF_ERROR(made.status());
    return (*made)->facts();
  });
  return without_exceptions("layer", [&] { return layer::agree_on(*world, "layer", facts); });
}

// What all ranks must have alike: each waits for the others where its own plan says so, and computes
// experts for the others' rows.
std::vector<layer::Fact> FusedMoE::Impl::facts() const {
  const ParallelConfig& p = options.parallel;
  const RoutingSpec& r = spec.routing;
  const ActivationSpec& a = spec.activation;
  const auto text = [](const auto& value) { return fmt::format("{}", value); };
  std::vector<layer::Fact> facts = {
      {"layer", text(spec.layer)},
      {"hidden_size", text(spec.hidden_size)},
      {"intermediate_size", text(spec.intermediate_size)},
      {"num_experts", text(spec.num_experts)},
      {"top_k", text(plan.routing.top_k)},
      {"routed hidden_size", text(plan.latent_size)},
      {"quant", text(plan.quant.scheme.name)},
      {"max_tokens", text(options.max_tokens)},
      {"transport", text(rank_transport_name(plan.ranks.transport))},
      {"reduction", plan.ranks.per_slot ? "per_slot" : "per_rank"},
      {"placement", text(expert_placement_name(p.placement))},
      {"slices of shared experts", text(plan.shared_slices)},
      {"reduce_results", text(!plan.ranks.leaves_sum)},
      {"enable_eplb", text(options.ranks.enable_eplb)},
      {"dual_batch_tokens", text(options.ranks.dual_batch_tokens)},
      {"slots of experts", text(plan.routed.num_experts)},
      {"backend", options.ranks.enable_eplb ? text(engine->experts_backend()) : ""},
      {"device", text(layer::engine_of(options.device).name)},
      {"combine_dtype", text(dtype_name(plan.ranks.combine_dtype))},
      {"pair_capacity", text(plan.ranks.pair_capacity)}};
  if (!MOESAIC_FAULT(layer_ranks_may_have_other_parts)) {
    facts.insert(facts.end(), {{"shared experts", text(plan.adds_shared)},
                               {"own shared experts", text(plan.has_shared)},
                               {"transform.input", text(plan.has_input_transform)},
                               {"transform.output", text(plan.has_output_transform)},
                               {"tp_size", text(p.tp_size)},
                               {"ep_size", text(p.ep_size)},
                               {"dp_size", text(p.dp_size)},
                               {"pcp_size", text(p.pcp_size)},
                               {"sp_size", text(p.sp_size)}});
  }
  if (!MOESAIC_FAULT(layer_ranks_may_round_differently)) {
    facts.push_back({"router_logits_dtype", text(gate::describe(plan.logit_rounding()))});
  }
  if (!MOESAIC_FAULT(layer_ranks_may_compute_differently)) {
    facts.insert(
        facts.end(),
        {{"activations", activation_text(plan.routed.quant)},
         {"activation dtype", text(dtype_name(plan.routed.activation_dtype))},
         {"activation", fmt::format("{} {} {} {} {}", activation_name(a.kind), a.limit, a.alpha,
                                    a.beta, a.up_limit)},
         {"weight on the input", text(spec.apply_router_weight_on_input)},
         {"expert bias", text(spec.has_expert_bias)},
         {"input_norm_eps", text(spec.input_norm_eps)},
         {"routing",
          fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {}", routing_method_name(r.method),
                      scoring_func_name(r.scoring_func), r.num_zero_experts, r.renormalize,
                      r.num_expert_group, r.topk_group, r.group_by_best_two, r.has_correction_bias,
                      r.has_expert_scale, r.scale_on_output, r.p_norm, r.jitter_eps, r.renorm_floor,
                      r.renorm_epsilon)},
         {"routed_scaling_factor", text(r.routed_scaling_factor)},
         {"eplb_window", options.ranks.enable_eplb ? text(options.ranks.eplb_window) : ""}});
  }
  return facts;
}

Result<std::unique_ptr<FusedMoE::Impl>> FusedMoE::Impl::build(MoeLayerWeights weights,
                                                              const Options& options) {
  const cpu::ScopedIeeeMode ieee;  // weights are quantised and unpacked
  const MoeLayerTensors& t = weights.tensors;
  if (!weights.experts) {
    return Status(StatusCode::kInvalidArgument, "experts: got no source, need one");
  }
  // A caller who computes shared experts may have kept their weights.
  if (const bool wanted = weights.spec.shared.intermediate_size > 0;
      wanted ? weights.shared == nullptr && options.include_shared : weights.shared != nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("shared: got {}, the layer's spec needs {}",
                              wanted ? "no source" : "a source", wanted ? "one" : "none"));
  }
  std::unique_ptr<Impl> impl(new (std::nothrow) Impl);
  if (!impl) return Status(StatusCode::kOutOfMemory, "cannot allocate the layer");
  impl->spec = weights.spec;
  impl->shared_stored = weights.shared_quant;
  impl->options = options;
  MOESAIC_ASSIGN_OR_RETURN(impl->plan,
                           layer::plan_made_layer(weights.spec, weights.shared_quant, options));
  MOESAIC_RETURN_IF_ERROR(check_tensors(weights.spec, t, options));

  if (t.gate_weight.present()) impl->plan.gate_dtype = t.gate_weight.dtype();
  MOESAIC_RETURN_IF_ERROR(check_device(options.device));
  if (impl->plan.ranks.active) {
    MOESAIC_ASSIGN_OR_RETURN(impl->mesh, layer::RankMesh::create(options, impl->plan.ranks));
  }
  const layer::EngineParts parts{impl->spec, impl->plan, options, weights, impl->mesh.get()};
  MOESAIC_ASSIGN_OR_RETURN(impl->engine, layer::engine_of(options.device).create(parts));
  MOESAIC_ASSIGN_OR_RETURN(impl->router_name, name_of_router(impl->plan));
  impl->options.progress = nullptr;  // loading is over
  return impl;
}

FusedMoE::FusedMoE(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
FusedMoE::FusedMoE(FusedMoE&&) noexcept = default;
FusedMoE& FusedMoE::operator=(FusedMoE&&) noexcept = default;
FusedMoE::~FusedMoE() = default;

const MoeLayerSpec& FusedMoE::spec() const { return impl_->spec; }
Device FusedMoE::device() const { return impl_->options.device; }
const Scheme& FusedMoE::quant() const { return impl_->plan.quant.scheme; }
double FusedMoE::activation_bound() const {
  const layer::FusedPlan& plan = impl_->plan;
  const double routed =
      moesaic::activation_bound(plan.quant.scheme.activation, plan.routed.intermediate_size);
  if (!plan.has_shared) return routed;
  return std::max(routed, moesaic::activation_bound(plan.shared_quant.scheme.activation,
                                                    plan.shared.intermediate_size));
}
std::string FusedMoE::experts_backend() const {
  return std::string(impl_->engine->experts_backend());
}
std::int64_t FusedMoE::workspace_bytes() const { return impl_->engine->workspace_bytes(); }
std::int64_t FusedMoE::weight_bytes() const { return impl_->engine->weight_bytes(); }
std::vector<CandidateReport> FusedMoE::explain() const {
  return explain_candidates(impl_->plan, impl_->router_name, impl_->options.device);
}
std::string FusedMoE::determinism() const {
  const RankOptions& ranks = impl_->options.ranks;
  std::string text = impl_->engine->determinism();
  if (ranks.enable_eplb && ranks.reduction_in_force() == RankReduction::kPerRank) {
    text +=
        "; load balancing with per_rank sums: the order of a row's sum depends on its place in a "
        "call and on where experts are";
  }
  return text;
}

bool FusedMoE::output_is_reduced() const {
  const Impl& m = *impl_;
  return m.mesh ? !m.plan.ranks.leaves_sum : m.options.parallel.flat_size() == 1;
}

RankTransport FusedMoE::transport() const { return impl_->plan.ranks.transport; }
std::int64_t FusedMoE::bytes_sent() const { return impl_->mesh ? impl_->mesh->bytes_sent() : 0; }

Result<LayerExplanation> explain_layer(const MoeLayerSpec& spec, const FusedMoE::Options& options) {
  return explain_layer(MoeLayerFormat{spec, spec.quant, DType::kBF16}, options);
}

Result<LayerExplanation> explain_layer(const MoeLayerFormat& format,
                                       const FusedMoE::Options& options) {
  const MoeLayerSpec& spec = format.spec;
  MOESAIC_ASSIGN_OR_RETURN(layer::FusedPlan plan,
                           layer::plan_fused_moe(spec, format.shared_quant, options));
  plan.gate_dtype = format.gate_dtype;
  const Result<std::string> router = name_of_router(plan);
  if (!router.ok()) return router.status().with_context("router");
  LayerExplanation explanation;
  explanation.activations = activation_text(plan.routed.quant);
  if (!plan.routed.quant.weight_only()) explanation.quant_note = spec.quant_note;
  explanation.candidates = explain_candidates(plan, *router, options.device);
  explanation.router_logits = gate::describe(plan.logit_rounding());
  MOESAIC_RETURN_IF_ERROR(
      layer::engine_of(options.device).explain(plan, spec, options, explanation));
  return explanation;
}

}  // namespace moesaic
