// A call of the CPU engine on rows that are all this process's.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "core/guarded.h"
#include "cpu/tiers.h"
#include "layer/call_args.h"
#include "layer/cpu/engine.h"
#include "layer/cpu/input_norm.h"
#include "layer/rows.h"
#include "numerics/element.h"

namespace moesaic::layer {
Result<CpuBuffers> CpuBuffers::carve(const FusedPlan& plan, const FusedMoE::Options& options,
                                     std::int64_t rows, Arena& arena) {
  // Products below stay under 2^62: rows < 2^31 (all their slots, too), columns < 2^31.
  const auto wide = [&arena](std::int64_t elements) {  // of the widest dtype of hidden states
    return reinterpret_cast<std::byte*>(arena.take<float>(elements));
  };
  CpuBuffers b;
  b.logits = arena.take<float>(rows * logit_columns(plan));
  b.topk_weights = arena.take<float>(rows * plan.routing.top_k);
  b.topk_ids = arena.take<std::int32_t>(rows * plan.routing.top_k);
  if (plan.input_norm_eps > 0) b.normed = arena.take<float>(rows * plan.hidden_size);
  if (options.transform.input || plan.input_norm_eps > 0) {
    b.latent = wide(rows * plan.latent_size);
  }
  if (!writes_output_directly(plan, options)) b.routed = arena.take<float>(rows * plan.latent_size);
  if (options.transform.output) b.routed_back = arena.take<float>(rows * plan.hidden_size);
  if (plan.adds_shared) {
    b.shared = arena.take<float>(rows * plan.hidden_size);
    b.shared_gate = arena.take<float>(rows);
    b.ones = arena.take<float>(rows);
    b.zeros = arena.take<std::int32_t>(rows);
  }
  if (plan.routing.num_zero_experts > 0) {
    b.zero_experts = wide(rows * plan.hidden_size);
  }
  if (plan.ranks.per_slot) {
    const std::int64_t slots = rows * plan.routing.top_k;
    b.slot_input = wide(slots * plan.latent_size);
    b.slot_weights = arena.take<float>(slots);
    b.slot_output = arena.take<float>(slots * plan.latent_size);
  }
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return b;
}

// b.logits: the caller's, or the gate's.
Status CpuEngine::compute_logits(const FusedMoE::Args& args, const CpuBuffers& b) const {
  const ConstTensorView& x = args.hidden_states;
  const std::int64_t rows = x.dim(0);
  if (args.router_logits.present()) {
    for (std::int64_t i = 0; i < rows * logit_columns(plan); ++i) {
      b.logits[i] = load_as_f32(args.router_logits.data, args.router_logits.dtype, i);
    }
    if (!MOESAIC_FAULT(layer_ignore_given_logits)) return {};
  }
  if (!gate) return {};  // no rows
  ConstTensorView gate_input = x;
  if (plan.input_norm_eps > 0) {
    normalise_rows(*kernels, x, plan.input_norm_eps, nullptr, b.normed, num_threads);
    gate_input = view_of(b.normed, DType::kF32, {rows, plan.hidden_size});
  }
  MOESAIC_RETURN_IF_ERROR(
      gate->forward(gate_input, view_of(b.logits, DType::kF32, {rows, logit_columns(plan)}))
          .with_context("gate"));
  plan.logit_rounding().apply(b.logits, rows * logit_columns(plan));
  return {};
}

Status CpuEngine::select_experts(const FusedMoE::Args& args, const CpuBuffers& b) const {
  const std::int64_t rows = args.hidden_states.dim(0);
  const std::int64_t k = plan.routing.top_k;
  Router::Args r;
  r.hidden_states = args.hidden_states;
  r.router_logits = view_of(b.logits, DType::kF32, {rows, logit_columns(plan)});
  if (plan.routing.method == RoutingMethod::kHash) r.input_ids = args.input_ids;
  r.padding_mask = args.padding_mask;
  r.topk_weights = view_of(b.topk_weights, DType::kF32, {rows, k});
  r.topk_ids = view_of(b.topk_ids, DType::kI32, {rows, k});
  if (spec.routing.num_zero_experts > 0) {
    r.zero_expert_output = view_of(b.zero_experts, DType::kF32, {rows, plan.hidden_size});
  }
  return router->select_experts(r).with_context("router");
}

// The caller's ids and weights, which are final, in the form that a router leaves.
void CpuEngine::take_routing(const FusedMoE::Args& args, const CpuBuffers& b) const {
  const ConstTensorView& x = args.hidden_states;
  const std::int64_t k = plan.routing.top_k, hidden = plan.hidden_size;
  for (std::int64_t t = 0; t < x.dim(0); ++t) {
    const bool padding = is_padding(args, t);
    float zero_weight = 0;
    for (std::int64_t slot = t * k; slot < (t + 1) * k; ++slot) {
      std::int64_t id = padding ? -1 : id_at(args.topk_ids, slot);
      // Of an empty slot not even the weight counts: a NaN there is nobody's.
      float weight = id < 0 ? 0.0F : args.topk_weights.as<float>()[slot];
      if (id >= plan.routing.num_experts) {  // an identity expert
        if (!MOESAIC_FAULT(layer_given_identity_weight_lost)) zero_weight += weight;
        id = 0;
        weight = 0;
      }
      b.topk_ids[slot] = static_cast<std::int32_t>(id);
      b.topk_weights[slot] = weight;
    }
    if (spec.routing.num_zero_experts == 0) continue;
    for (std::int64_t h = 0; h < hidden; ++h) {
      const float v = load_as_f32(x.data, x.dtype, t * x.strides[0] + h);
      store_from_f32(b.zero_experts, DType::kF32, t * hidden + h, padding ? 0 : zero_weight * v);
    }
  }
}

Status CpuEngine::route(const FusedMoE::Args& args, const CpuBuffers& b) const {
  const std::int64_t rows = args.hidden_states.dim(0);
  const std::int64_t k = plan.routing.top_k;
  if (args.topk_ids.present()) {
    take_routing(args, b);
  } else {
    MOESAIC_RETURN_IF_ERROR(compute_logits(args, b));
    MOESAIC_RETURN_IF_ERROR(select_experts(args, b));
  }
  const auto report = [](const TensorView& to, const void* from) {
    if (!to.present()) return;
    std::memcpy(to.data, from, static_cast<std::size_t>(to.dim(0) * to.dim(1)) * sizeof(float));
  };
  report(args.trace.router_logits, b.logits);
  report(args.trace.topk_weights, b.topk_weights);
  report(args.trace.topk_ids, b.topk_ids);
  if (options.capture) {
    MOESAIC_RETURN_IF_ERROR(guarded("capture", [&] {
      options.capture(view_of(b.topk_ids, DType::kI32, {rows, k}));
      return Status();
    }));
  }
  if (plan.routing.num_zero_experts > 0 && !MOESAIC_FAULT(layer_identity_slots_are_computed)) {
    // Slots of identity experts arrive as expert 0 with weight 0: it is not to be computed (an
    // infinity there would reach the row), no row need travel for them, and they are no load.
    for (std::int64_t slot = 0; slot < rows * k; ++slot) {
      if (b.topk_weights[slot] == 0.0F) b.topk_ids[slot] = -1;
    }
  }
  if (MOESAIC_FAULT(layer_router_weights_of_one)) {
    std::fill(b.topk_weights, b.topk_weights + rows * k, 1.0F);
  }
  if (expert_balancer)
    return expert_balancer->map_ids(b.topk_ids, rows, k).with_context("load balancing");
  return {};
}

Result<ModularKernel::Args> CpuEngine::routed_args(const RoutedRows& r, const CpuBuffers& b,
                                                   const TensorView& output) const {
  const std::int64_t rows = r.x.dim(0);
  ConstTensorView input = r.x;
  if (options.transform.input) {
    const TensorView latent = view_of(b.latent, r.x.dtype, {rows, plan.latent_size});
    MOESAIC_RETURN_IF_ERROR(
        guarded("transform.input", [&] { return options.transform.input(r.x, latent); }));
    input = latent;
  }
  if (plan.input_norm_eps > 0 && !MOESAIC_FAULT(layer_experts_see_raw_rows)) {
    const TensorView normed = view_of(b.latent, DType::kF32, {rows, plan.hidden_size});
    normalise_rows(*kernels, r.x, plan.input_norm_eps, experts_norm_weight->as<float>(),
                   reinterpret_cast<float*>(b.latent), num_threads);
    input = normed;
  }
  if (plan.ranks.per_slot) return slot_args(input, r, b);
  ModularKernel::Args a;
  a.hidden_states = input;
  a.topk_weights = view_of(r.weights, DType::kF32, {rows, plan.routing.top_k});
  a.topk_ids = view_of(r.ids, DType::kI32, {rows, plan.routing.top_k});
  a.expert_map = plan.expert_map;
  a.output = writes_output_directly(plan, options)
                 ? output
                 : view_of(b.routed, DType::kF32, {rows, plan.latent_size});
  return a;
}

Status CpuEngine::run_routed(const RoutedRows& r, const CpuBuffers& b, const TensorView& output,
                             std::span<RowNumerics> numerics) const {
  MOESAIC_ASSIGN_OR_RETURN(ModularKernel::Args a, routed_args(r, b, output));
  a.numerics = numerics;
  MOESAIC_RETURN_IF_ERROR(kernel->run(a).with_context("experts"));
  for (RowNumerics& row : numerics) {
    const RowNumerics unscaled = std::exchange(row, RowNumerics());
    row.add(unscaled, static_cast<double>(plan.output_scale));
  }
  return finish_routed(r, b);
}

Status CpuEngine::finish_routed(const RoutedRows& r, const CpuBuffers& b) const {
  if (plan.ranks.per_slot) MOESAIC_RETURN_IF_ERROR(add_slots(r, b));
  if (!options.transform.output) return {};
  const std::int64_t rows = r.x.dim(0);
  const TensorView routed = view_of(b.routed, DType::kF32, {rows, plan.latent_size});
  // A transform need not be linear: the parts of all ranks are added up and scaled before it.
  if (!plan.ranks.reduced && !plan.ranks.per_slot) {
    MOESAIC_RETURN_IF_ERROR(
        mesh->reduce_replicas({b.routed, static_cast<std::size_t>(rows * plan.latent_size)}));
  }
  for (std::int64_t i = 0; i < rows * plan.latent_size; ++i) b.routed[i] *= plan.output_scale;
  const TensorView back = view_of(b.routed_back, DType::kF32, {rows, plan.hidden_size});
  return guarded("transform.output", [&] { return options.transform.output(routed, back); });
}

Status CpuEngine::run_shared(const ConstTensorView& x, const CpuBuffers& b,
                             std::span<RowNumerics> numerics) const {
  if (!plan.adds_shared) return {};
  const std::int64_t rows = x.dim(0);
  std::fill(b.ones, b.ones + rows, 1.0F);
  if (!shared) {
    if (rows == 0) return {};
    return guarded("shared_experts", [&] {
      return options.shared_experts(x, view_of(b.shared, DType::kF32, {rows, plan.hidden_size}));
    });
  }
  std::fill(b.zeros, b.zeros + rows, 0);
  ModularKernel::Args a;
  a.hidden_states = x;
  a.topk_weights = view_of(b.ones, DType::kF32, {rows, 1});
  a.topk_ids = view_of(b.zeros, DType::kI32, {rows, 1});
  a.output = view_of(b.shared, DType::kF32, {rows, plan.hidden_size});
  std::vector<RowNumerics> of_shared(numerics.size());
  a.numerics = of_shared;
  MOESAIC_RETURN_IF_ERROR(shared->run(a).with_context("shared_experts"));
  // From here on `ones` holds the factor of the shared result.
  if (shared_gate && !MOESAIC_FAULT(layer_ignore_shared_gate)) {
    MOESAIC_RETURN_IF_ERROR(shared_gate->forward(x, view_of(b.shared_gate, DType::kF32, {rows, 1}))
                                .with_context("shared_experts gate"));
    for (std::int64_t t = 0; t < rows; ++t) b.ones[t] = 1.0F / (1.0F + std::exp(-b.shared_gate[t]));
  }
  for (std::size_t t = 0; t < numerics.size(); ++t) {
    numerics[t].add(of_shared[t], static_cast<double>(b.ones[t]));
  }
  return {};
}

void CpuEngine::store_shared(const CombineRows& c, const CpuBuffers& b,
                             const TensorView& to) const {
  add_up({RowPart{b.shared, c.shared_first, 1.0F, b.ones}}, c.rows, to);
}

void CpuEngine::combine(const CombineRows& c, const CpuBuffers& b,
                        const FusedMoE::Args& args) const {
  const TensorView& output = args.output;
  const bool apart = args.shared_output.present();
  if (apart) store_shared(c, b, args.shared_output);
  std::array<RowPart, 3> parts;
  parts[0] = {options.transform.output ? b.routed_back : b.routed, c.routed_first,
              options.transform.output ? 1.0F : plan.output_scale};
  if (MOESAIC_FAULT(layer_scale_twice)) {
    parts[0].factor *= static_cast<float>(spec.routing.routed_scaling_factor);
  }
  if (plan.adds_shared && !apart && !MOESAIC_FAULT(layer_omit_shared)) {
    parts[1] = {b.shared, c.shared_first, 1.0F, b.ones};
  }
  if (plan.has_zero_experts) parts[2].rows = reinterpret_cast<const float*>(b.zero_experts);
  add_up(parts, c.rows, output);
}

void CpuEngine::clear_padding(const FusedMoE::Args& args) const {
  forget_padding(args);
  for (const TensorView* to : {&args.output, &args.shared_output}) {
    if (!to->present()) continue;
    const std::int64_t row_bytes = plan.hidden_size * dtype_bits(to->dtype) / 8;
    for (std::int64_t t = 0; t < args.hidden_states.dim(0); ++t) {
      if (is_padding(args, t) && !MOESAIC_FAULT(layer_padding_gets_shared_experts)) {
        std::fill_n(to->data + t * row_bytes, row_bytes, std::byte{0});
      }
    }
  }
}

Result<CpuBuffers> CpuEngine::buffers(int slot, std::int64_t rows) const {
  const std::int64_t bytes = workspace.bytes() / plan.ranks.in_flight;
  Arena arena(
      {const_cast<std::byte*>(workspace.data()) + slot * bytes, static_cast<std::size_t>(bytes)});
  return CpuBuffers::carve(plan, options, rows, arena);
}

Status CpuEngine::forward_host(const FusedMoE::Args& args) const {
  const cpu::ScopedIeeeMode ieee;
  if (mesh) {
    MOESAIC_ASSIGN_OR_RETURN(Flight flight, depart(args, 0));
    MOESAIC_RETURN_IF_ERROR(compute(flight));
    return arrive(flight);
  }
  const ConstTensorView& x = args.hidden_states;
  const std::int64_t rows = x.dim(0);
  MOESAIC_ASSIGN_OR_RETURN(const CpuBuffers b, buffers(0, rows));
  MOESAIC_RETURN_IF_ERROR(route(args, b));
  const std::span<RowNumerics> numerics = args.trace.numerics;
  MOESAIC_RETURN_IF_ERROR(run_routed({x, b.topk_weights, b.topk_ids}, b, args.output, numerics));
  MOESAIC_RETURN_IF_ERROR(run_shared(x, b, numerics));
  if (!writes_output_directly(plan, options)) combine({{0, rows}}, b, args);
  clear_padding(args);
  return {};
}

}  // namespace moesaic::layer
