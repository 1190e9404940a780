#include "layer/fused_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "layer/expert_balancer.h"
#include "parallel/expert_share.h"
#include "quant/compute_scheme.h"
#include "quant/width_slice.h"

namespace moesaic::layer {
namespace {

// A function is for the device of the layer.
Status check_device_functions(const FusedMoE::Options& o) {
  const bool gpu = o.device.is_cuda();
  struct Pair {
    std::string_view on_host, on_device;
    bool has_host, has_device;
  };
  const LayerDeviceFunctions& d = o.on_device;
  const auto has = [](const auto& function) { return static_cast<bool>(function); };
  for (const Pair& f : {Pair{"custom_routing", "on_device.custom_routing", has(o.custom_routing),
                             has(d.custom_routing)},
                        Pair{"transform.input", "on_device.routed_input", has(o.transform.input),
                             has(d.routed_input)},
                        Pair{"transform.output", "on_device.routed_output", has(o.transform.output),
                             has(d.routed_output)},
                        Pair{"shared_experts", "on_device.shared_experts", has(o.shared_experts),
                             has(d.shared_experts)},
                        Pair{"capture", "on_device.capture", has(o.capture), has(d.capture)}}) {
    if (gpu ? !f.has_host : !f.has_device) continue;
    return unsupported(fmt::format("{}: got a function for a layer on {}, need {}",
                                   gpu ? f.on_host : f.on_device, o.device.to_string(),
                                   gpu ? f.on_device : f.on_host));
  }
  return {};
}

Status check_options(const MoeLayerSpec& spec, const FusedMoE::Options& o) {
  if (o.max_tokens < 1 || o.max_tokens > std::numeric_limits<std::int32_t>::max()) {
    return invalid(fmt::format("max_tokens: got {}, need 1 .. 2^31-1", o.max_tokens));
  }
  MOESAIC_RETURN_IF_ERROR(expect_threads(o.num_threads));
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("router_logits_dtype", o.router_logits_dtype));
  if (!o.include_gate && (o.router_logits_dtype != DType::kF32 || !o.gate_force_fp32_compute)) {
    return invalid(fmt::format(
        "{} with include_gate = false: the caller's logits are taken as they are; need "
        "the default",
        o.gate_force_fp32_compute
            ? fmt::format("router_logits_dtype: got {}", dtype_name(o.router_logits_dtype))
            : "gate_force_fp32_compute: got false"));
  }
  if (o.shared_stream && (!o.device.is_cuda() || o.ranks.communicator)) {
    return unsupported(fmt::format("shared_stream: got true {}, need false, or one GPU",
                                   o.ranks.communicator ? "over ranks" : "on the CPU"));
  }
  const RoutingMethod method = spec.routing.method;
  if (method == RoutingMethod::kSimulated) {
    return unsupported(
        fmt::format("routing.method: got {}, which is no function of the input; need a Router of "
                    "your own, whose ids the layer takes",
                    routing_method_name(method)));
  }
  MOESAIC_RETURN_IF_ERROR(check_device_functions(o));
  const bool custom = method == RoutingMethod::kCustom;
  if (custom != (o.custom_routing || o.on_device.custom_routing)) {
    return invalid(fmt::format("custom_routing: got {} with routing method {}, need {}",
                               custom ? "none" : "one", routing_method_name(method),
                               custom ? "a function" : "none"));
  }
  return {};
}

// Sizes around the transforms; fills latent_size.
Status check_transforms(const MoeLayerSpec& spec, const FusedMoE::Options& o, FusedPlan& plan) {
  plan.hidden_size = spec.hidden_size;
  plan.latent_size = spec.hidden_size;
  plan.input_norm_eps = spec.input_norm_eps;
  const bool input = plan.has_input_transform = o.transform.input || o.on_device.routed_input;
  const bool output = plan.has_output_transform = o.transform.output || o.on_device.routed_output;
  if (spec.input_norm_eps > 0 && (input || output)) {
    return unsupported(fmt::format("routed transforms: got one with input_norm_eps {}, need none",
                                   spec.input_norm_eps));
  }
  if (!input) {
    if (o.transform.hidden_size == 0 && !output) return {};
    return invalid(fmt::format("transform.input: got none with {}, need one or neither",
                               output ? "an output transform" : "transform.hidden_size"));
  }
  if (o.transform.hidden_size < 1) {
    return invalid(fmt::format("transform.hidden_size: got {}, a transform needs >= 1",
                               o.transform.hidden_size));
  }
  plan.latent_size = o.transform.hidden_size;
  if (!output && plan.latent_size != plan.hidden_size) {
    return invalid(
        fmt::format("transform.hidden_size: got {}, need hidden_size {} or an output transform",
                    plan.latent_size, plan.hidden_size));
  }
  if (output && !o.ranks.communicator && o.parallel.flat_size() > 1) {
    return unsupported(
        "transform.output: got one with several ranks, whose partial sums a transform need "
        "not respect; need one rank or a communicator");
  }
  return {};
}

// Exactly once: in the router's weights, or here. Methods whose weights the router never scales,
// and models that ask for it, are scaled here; the router is then given a factor of 1.
void place_scaling_factor(const RoutingSpec& routing, FusedPlan& plan) {
  plan.routing = routing;
  const bool router_cannot =
      routing.method == RoutingMethod::kLlama4 || routing.method == RoutingMethod::kCustom;
  if (!routing.scale_on_output && !router_cannot) return;
  plan.output_scale = static_cast<float>(routing.routed_scaling_factor);
  plan.routing.routed_scaling_factor = 1.0;
}

MoeProblem common_problem(const MoeLayerSpec& spec, const QuantPlan& quant,
                          const FusedMoE::Options& o) {
  MoeProblem p;
  p.activation = spec.activation;
  p.quant = quant.scheme;
  p.activation_dtype = quant.activation_dtype;
  p.format = ActivationFormat::kStandard;
  p.max_tokens = o.max_tokens;
  p.num_threads = o.num_threads;
  p.device = o.device;
  return p;
}

// Slices of a shared expert (RankOptions::cut_shared): as many as ranks have the same rows, where the
// parts of these ranks are added up.
Result<int> plan_shared_slices(const FusedMoE::Options& o, const FusedPlan& plan,
                               bool shared_function) {
  if (!o.ranks.cut_shared) return 1;
  const int slices = quant::row_sharing(o.parallel).ranks;
  const auto refused = [](const std::string& why) {
    return unsupported("cut_shared: got true " + why);
  };
  if (shared_function) return refused("with shared experts that are a function, which is whole");
  if (o.ranks.enable_eplb) return refused("with enable_eplb, need one of them");
  if (slices == 1) return 1;
  if (!plan.ranks.active) {
    if (slices == o.parallel.flat_size()) return slices;
    return refused(fmt::format("without a communicator for {} ranks of which {} have the same rows",
                               o.parallel.flat_size(), slices));
  }
  // The order of one rank, also where a row has one expert only.
  const bool per_slot = o.ranks.reduction_in_force() == RankReduction::kPerSlot &&
                        !MOESAIC_FAULT(layer_slices_of_shared_per_slot);
  if (plan.ranks.reduced || per_slot || plan.has_output_transform) {
    return refused(fmt::format(
        "with {}, where ranks with the same rows do not add up parts; need transport "
        "none (or gather "
        "with tensor parallelism) and per_rank",
        plan.has_output_transform ? "an output transform"
        : per_slot                ? "reduction per_slot"
                   : fmt::format("transport {}", rank_transport_name(plan.ranks.transport))));
  }
  return slices;
}

}  // namespace

Result<FusedPlan> plan_fused_moe(const MoeLayerSpec& spec, const Scheme& shared_stored,
                                 const FusedMoE::Options& options) {
  MOESAIC_RETURN_IF_ERROR(validate(spec));
  MOESAIC_RETURN_IF_ERROR(options.parallel.validate());
  MOESAIC_RETURN_IF_ERROR(check_options(spec, options));
  FusedPlan plan;
  MOESAIC_RETURN_IF_ERROR(check_transforms(spec, options, plan));
  place_scaling_factor(spec.routing, plan);
  plan.has_router_bias = spec.has_router_bias;
  plan.rows_dtype = spec.activation_dtype;
  plan.inplace = options.inplace;
  plan.shared_stream = options.shared_stream;
  plan.has_gate = options.include_gate;
  plan.backend = options.backend;
  plan.hash_vocabulary = spec.hash_vocabulary;
  plan.router_logits_dtype = options.router_logits_dtype;
  plan.gate_force_fp32_compute = options.gate_force_fp32_compute;
  MOESAIC_ASSIGN_OR_RETURN(plan.quant,
                           plan_quant(spec.quant, spec.activation_dtype, options.quant));
  if (options.activation_scales && !MOESAIC_FAULT(layer_activation_scales_ignored)) {
    MOESAIC_ASSIGN_OR_RETURN(plan.quant.scheme,
                             with_activation_scales(plan.quant.scheme, *options.activation_scales));
  }
  const auto physical = checked_add(spec.num_experts, options.ranks.num_redundant_experts);
  if (options.ranks.num_redundant_experts < 0 || !physical) {
    return invalid(fmt::format("num_redundant_experts: got {}, need a number >= 0",
                               options.ranks.num_redundant_experts));
  }
  if (options.ranks.enable_eplb) {
    MOESAIC_RETURN_IF_ERROR(check_slots(
        {spec.num_experts, *physical, options.parallel.ep_size, options.parallel.ep_rank},
        options.ranks.eplb_window));
  }
  MOESAIC_ASSIGN_OR_RETURN(const ExpertShare local, expert_share(*physical, options.parallel));

  MOESAIC_ASSIGN_OR_RETURN(plan.ranks, plan_ranks(options, spec.routing.top_k));
  MoeProblem& routed = plan.routed = common_problem(spec, plan.quant, options);
  routed.num_experts = *physical;
  routed.num_local_experts = local.count;
  routed.top_k = plan.ranks.slots_as_rows ? 1 : spec.routing.top_k;
  if (routed.top_k > *physical) {  // legal for the router of a model with identity experts
    return unsupported(fmt::format(
        "routing.top_k: got {}, need at most {} (num_experts): the experts take no more "
        "slots than there are experts, identity experts not counted",
        routed.top_k, *physical));
  }
  routed.max_tokens = plan.ranks.experts_rows;
  if (plan.ranks.transport == RankTransport::kBatched) routed.format = ActivationFormat::kBatched;
  routed.hidden_size = plan.latent_size;
  const bool uneven = quant::is_cut_unevenly(spec.quant);
  MOESAIC_ASSIGN_OR_RETURN(
      const quant::WidthSlice width,
      quant::slice_width("intermediate_size", spec.intermediate_size, options.parallel.tp_size,
                         options.parallel.tp_rank, uneven ? spec.quant.weight.block_k : 1, uneven));
  routed.intermediate_size = width.padded;
  routed.has_expert_bias = spec.has_expert_bias;
  routed.apply_router_weight_on_input = spec.apply_router_weight_on_input;

  plan.quant.scheme.output_bound = output_bound(plan.quant.scheme, routed.intermediate_size);
  if (routed.apply_router_weight_on_input) {
    const DType rows = quant::operand_dtype(routed.activation_dtype, routed.quant.kind);
    plan.quant.scheme.output_bound =
        std::hypot(plan.quant.scheme.output_bound, weight_on_input_bound(rows));
  }

  // What enters the sum over ranks once is rank 0's when the caller adds them up. Ranks that
  // communicate each compute it for rows of their own.
  const bool first_rank = plan.ranks.active ||
                          (options.parallel.tp_rank == 0 && options.parallel.ep_rank == 0) ||
                          MOESAIC_FAULT(layer_shared_on_every_rank);
  plan.has_zero_experts = spec.routing.num_zero_experts > 0 && first_rank;
  const bool own_shared = spec.shared.intermediate_size > 0 && options.include_shared;
  const bool shared_function = options.shared_experts || options.on_device.shared_experts;
  if (own_shared && shared_function) {
    return invalid(
        "shared_experts: got a function beside the layer's own, need include_shared = false");
  }
  MOESAIC_ASSIGN_OR_RETURN(plan.shared_slices, plan_shared_slices(options, plan, shared_function));
  plan.has_shared = own_shared && (first_rank || plan.shared_slices > 1);
  plan.adds_shared = plan.has_shared || (shared_function && first_rank);
  if (plan.has_shared) {
    MOESAIC_ASSIGN_OR_RETURN(
        plan.shared_quant,
        plan_shared_quant(shared_stored, spec.quant, spec.activation_dtype, options.quant));
    if (options.activation_scales) {  // where it has such scales: it may be left unquantised
      const Result<Scheme> scaled =
          with_activation_scales(plan.shared_quant.scheme, *options.activation_scales);
      if (scaled.ok()) plan.shared_quant.scheme = *scaled;
    }
    const bool uneven_shared = plan.shared_slices > 1 && quant::is_cut_unevenly(shared_stored);
    MOESAIC_ASSIGN_OR_RETURN(
        const quant::WidthSlice shared_width,
        quant::slice_width("shared.intermediate_size", spec.shared.intermediate_size,
                           plan.shared_slices,
                           plan.shared_slices > 1 ? quant::row_sharing(options.parallel).rank : 0,
                           uneven_shared ? shared_stored.weight.block_k : 1, uneven_shared));
    plan.shared_quant.scheme.output_bound =
        output_bound(plan.shared_quant.scheme, shared_width.padded);
    // The bound is the whole layer's: the shared expert may be the one that quantises activations.
    if (!MOESAIC_FAULT(layer_bound_ignores_shared)) {
      plan.quant.scheme.output_bound =
          std::max(plan.quant.scheme.output_bound, plan.shared_quant.scheme.output_bound);
    }
    plan.shared = common_problem(spec, plan.shared_quant, options);
    plan.shared.num_experts = plan.shared.num_local_experts = plan.shared.top_k = 1;
    plan.shared.hidden_size = spec.hidden_size;
    plan.shared.intermediate_size = shared_width.padded;
    if (spec.shared.activation && !MOESAIC_FAULT(layer_shared_activation_of_experts)) {
      plan.shared.activation = *spec.shared.activation;
    }
  }
  return plan;
}

Result<FusedPlan> plan_made_layer(const MoeLayerSpec& spec, const Scheme& shared_stored,
                                  const FusedMoE::Options& options) {
  MOESAIC_ASSIGN_OR_RETURN(FusedPlan plan, plan_fused_moe(spec, shared_stored, options));
  MOESAIC_ASSIGN_OR_RETURN(plan.expert_map,
                           make_expert_map(plan.routed.num_experts, options.parallel));
  return plan;
}

}  // namespace moesaic::layer
