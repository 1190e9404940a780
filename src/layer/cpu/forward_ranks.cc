// A call of the CPU engine over ranks: which rows this rank gives to the kernel, and how its
// result becomes that of all ranks. Every contribution is added exactly once:
//   reduced      the kernel's rows are complete; replicas shared the rows and exchange finished ones
//   not reduced  partial sums, and with them the shared experts of this replica's share of the rows,
//                are added up in one collective
// Shared experts and identity experts are whole on every rank, which computes them for its rows.
// Source: docs/spec/parallel.md section 5.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/fault.h"
#include "cpu/tiers.h"
#include "layer/cpu/engine.h"
#include "layer/rows.h"

namespace moesaic::layer {
namespace {

bool weighs_slots_inputs(const FusedPlan& plan) {
  return plan.routed.apply_router_weight_on_input && !MOESAIC_FAULT(layer_slots_weigh_outputs);
}

}  // namespace

// Every slot as a row of its own, so that its result comes back by itself. The weight acts on the
// row where it belongs to the input, else in the sum (add_slots): a row times one is the row.
ModularKernel::Args CpuEngine::slot_args(const ConstTensorView& input, const RoutedRows& r,
                                         const CpuBuffers& b) const {
  const std::int64_t k = plan.routing.top_k;
  const std::int64_t rows = input.dim(0);
  const std::int64_t width = plan.latent_size;
  const std::int64_t element = dtype_bits(input.dtype) / 8;
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t j = 0; j < k; ++j) {
      std::memcpy(b.slot_input + (t * k + j) * width * element,
                  input.data + t * input.strides[0] * element,
                  static_cast<std::size_t>(width * element));
    }
  }
  if (weighs_slots_inputs(plan)) {
    std::copy(r.weights, r.weights + rows * k, b.slot_weights);
  } else {
    std::fill(b.slot_weights, b.slot_weights + rows * k, 1.0F);
  }
  ModularKernel::Args a;
  a.hidden_states = view_of(b.slot_input, input.dtype, {rows * k, width});
  a.topk_weights = view_of(b.slot_weights, DType::kF32, {rows * k, 1});
  a.topk_ids = view_of(r.ids, DType::kI32, {rows * k, 1});
  a.expert_map = plan.expert_map;
  a.output = view_of(b.slot_output, DType::kF32, {rows * k, width});
  return a;
}

// b.routed = the routed experts' sum of each row, added in slot order from rows that came back one
// by one.
Status CpuEngine::add_slots(const RoutedRows& r, const CpuBuffers& b) const {
  const std::int64_t k = plan.routing.top_k;
  const std::int64_t rows = r.x.dim(0);
  const std::int64_t width = plan.latent_size;
  const bool weighted = weighs_slots_inputs(plan);
  if (!plan.ranks.reduced) {  // a slot's row is zero on all ranks but one
    MOESAIC_RETURN_IF_ERROR(
        mesh->reduce_replicas({b.slot_output, static_cast<std::size_t>(rows * k * width)}));
  }
  for (std::int64_t t = 0; t < rows; ++t) {
    float* sum = b.routed + t * width;
    std::fill(sum, sum + width, 0.0F);
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t slot = t * k + (MOESAIC_FAULT(layer_slots_in_reverse) ? k - 1 - i : i);
      if (r.ids[slot] < 0) continue;
      kernel->experts().accumulate(b.slot_output + slot * width, weighted ? 1.0F : r.weights[slot],
                                   width, sum);
    }
  }
  return {};
}

// A failure of the kernel. Where its rows are complete, all ranks hear of it in the kernel's own
// steps; else some of them wait for this rank's part of a sum.
Status CpuEngine::kernel_failure(const Status& status) const {
  const Status named = status.with_context("experts");
  const bool heard = plan.ranks.reduced || MOESAIC_FAULT(layer_others_wait_for_a_failed_kernel);
  return heard ? named : mesh->give_up(named);
}

// Routes the rows of a call and sends those that this rank gives to the kernel on their way.
Result<CpuEngine::Flight> CpuEngine::depart(const FusedMoE::Args& args, int slot) const {
  if (MOESAIC_FAULT(layer_batches_share_buffers)) slot = 0;
  const ConstTensorView& x = args.hidden_states;
  const RankPlan& ranks = plan.ranks;
  const std::int64_t k = plan.routing.top_k;
  Flight f;
  f.args = &args;
  MOESAIC_ASSIGN_OR_RETURN(f.b, buffers(slot, x.dim(0)));
  MOESAIC_RETURN_IF_ERROR(mesh->give_up(route(args, f.b)));
  f.all = {0, x.dim(0)};
  f.share = replica_share(f.all.count, ranks.replicas, ranks.replica);
  if (MOESAIC_FAULT(layer_shared_by_every_replica)) f.share = f.all;
  f.given = ranks.reduced ? f.share : f.all;
  f.rows = {rows_of(x, f.given.first, f.given.count), f.b.topk_weights + f.given.first * k,
            f.b.topk_ids + f.given.first * k};
  const Result<ModularKernel::Args> a =
      routed_args(f.rows, f.b, rows_of(args.output, f.given.first, f.given.count));
  if (!a.ok()) return mesh->give_up(a.status());
  Result<ModularKernel::Call> call = kernel->start(*a);
  if (!call.ok()) return kernel_failure(call.status());
  f.call.emplace(std::move(call).value());
  return f;
}

Status CpuEngine::compute(Flight& f) const { return kernel_failure(f.call->run_experts()); }

// The shared experts work while the results of the routed ones travel.
Status CpuEngine::arrive(Flight& f) const {
  const ConstTensorView& x = f.args->hidden_states;
  const RowRange shared_rows = shared_rows_of(f);
  const Status shared_status = run_shared(rows_of(x, shared_rows.first, shared_rows.count), f.b);
  // Whatever they did, this rank takes part in what the others wait in.
  const Status routed_status = f.call->finish();
  f.call.reset();
  MOESAIC_RETURN_IF_ERROR(kernel_failure(routed_status));
  const Status finished = finish_routed(f.rows, f.b);
  if (MOESAIC_FAULT(layer_others_wait_for_a_failed_transform)) MOESAIC_RETURN_IF_ERROR(finished);
  MOESAIC_RETURN_IF_ERROR(mesh->give_up(finished));
  MOESAIC_RETURN_IF_ERROR(mesh->give_up(shared_status));
  MOESAIC_RETURN_IF_ERROR(combine_over_ranks(f));
  clear_padding(*f.args);
  return {};
}

// The rows of the second travel while the experts work on the first, and the results of the first
// while they work on the second. A failure of the one leaves the other's steps as they are: all
// ranks take the same ones.
Status CpuEngine::forward_pair(const FusedMoE::Args& first, const FusedMoE::Args& second) const {
  const cpu::ScopedIeeeMode ieee;
  Result<Flight> a = depart(first, 0);
  Result<Flight> b = depart(second, 1);
  Status of_a = a.ok() ? compute(*a) : a.status();
  Status of_b = b.ok() ? compute(*b) : b.status();
  if (of_a.ok()) of_a = arrive(*a);
  if (of_b.ok()) of_b = arrive(*b);
  return of_a.ok() ? of_b : of_a;
}

// A shared expert that is whole is computed once for each row, slices of it are by every rank.
RowRange CpuEngine::shared_rows_of(const Flight& f) const {
  return plan.shared_slices > 1 ? f.all : f.share;
}

// The shared part apart, complete on every replica.
Status CpuEngine::share_shared(const Flight& f) const {
  const TensorView& to = f.args->shared_output;
  const CpuBuffers& b = f.b;
  const RowRange rows = shared_rows_of(f);
  const bool complete = !MOESAIC_FAULT(layer_shared_part_stays_partial);
  if (plan.shared_slices == 1) {
    store_shared({rows, 0, rows.first}, b, to);
    return complete ? mesh->gather_replicas(to) : Status();
  }
  const std::int64_t elements = rows.count * plan.hidden_size;
  add_up({RowPart{b.shared, 0, 1.0F, b.ones}}, {0, rows.count},
         view_of(b.shared, DType::kF32, {rows.count, plan.hidden_size}));
  std::fill(b.ones, b.ones + rows.count, 1.0F);
  if (complete) {
    MOESAIC_RETURN_IF_ERROR(mesh->reduce_replicas({b.shared, static_cast<std::size_t>(elements)}));
  }
  store_shared({rows, 0, 0}, b, to);
  return {};
}

Status CpuEngine::combine_over_ranks(const Flight& f) const {
  const FusedMoE::Args& args = *f.args;
  const CpuBuffers& b = f.b;
  const RowRange &all = f.all, &share = f.share, &given = f.given;
  const TensorView& output = args.output;
  const bool apart = args.shared_output.present();
  const bool gather_shared = apart && !MOESAIC_FAULT(layer_shared_part_stays_partial);
  const RankPlan& ranks = plan.ranks;
  const bool complete = ranks.reduced || ranks.per_slot || options.transform.output;
  if (complete) {
    // Without shared experts every replica can finish what it was given by itself.
    const RowRange mine = plan.adds_shared ? share : given;
    if (!writes_output_directly(plan, options)) combine({mine, given.first, share.first}, b, args);
    if (ranks.replicas == 1) return {};
    if (gather_shared) MOESAIC_RETURN_IF_ERROR(mesh->gather_replicas(args.shared_output));
    return plan.adds_shared || ranks.reduced ? mesh->gather_replicas(output) : Status();
  }

  const std::int64_t hidden = plan.hidden_size;
  const std::int64_t elements = all.count * hidden;
  std::array<RowPart, 3> parts = {RowPart{b.routed, 0, plan.output_scale}};
  if (apart) {
    MOESAIC_RETURN_IF_ERROR(share_shared(f));
  } else if (plan.adds_shared && !MOESAIC_FAULT(layer_omit_shared)) {
    RowRange shared_rows = shared_rows_of(f);
    if (MOESAIC_FAULT(layer_slices_of_shared_for_a_share)) shared_rows.count = share.count;
    parts[1] = {b.shared, shared_rows.first, 1.0F, b.ones, shared_rows};
  }
  add_up(parts, {0, all.count}, view_of(b.routed, DType::kF32, {all.count, hidden}));
  RowRange identity = all;
  if (ranks.leaves_sum) {
    // The identity experts of a row enter once: with the rank whose share it is in.
    if (!MOESAIC_FAULT(layer_unreduced_identity_of_every_replica)) identity = share;
  } else {
    MOESAIC_RETURN_IF_ERROR(mesh->reduce_replicas({b.routed, static_cast<std::size_t>(elements)}));
  }
  parts = {RowPart{b.routed}};
  if (plan.has_zero_experts) {
    parts[2] = {reinterpret_cast<const float*>(b.zero_experts), 0, 1.0F, nullptr, identity};
  }
  add_up(parts, {0, all.count}, output);
  return {};
}

}  // namespace moesaic::layer
