// The call of a CudaLayer over ranks: which rows this rank hands to the experts of all, and how the
// result becomes that of all ranks. What is added, where and in which order is
// cpu/forward_ranks.cc's; the host waits for the other ranks at each exchange.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/fault.h"
#include "layer/sm90/layer_impl.h"
#include "layer/sm90/layer_ops.h"
#include "permute/sm90/combine.h"
#include "prepare_finalize/sm90/slot_sums.h"

namespace moesaic::cuda {

// This rank's experts on some rows, to rows.expert_output: sums, or (per slot) all weighted rows.
Status CudaLayer::Impl::run_experts(void* stream, const Prepared& rows,
                                    const LayerWorkspace& w) const {
  const TensorView& to = rows.expert_output;
  const bool slabs = plan.routed.format == ActivationFormat::kBatched;
  const std::int64_t count = rows.hidden_states.dim(slabs ? 1 : 0);
  if (count == 0) return {};
  if (!experts) {
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(to.dtype, to.shape));
    return fill_zero("experts", to.data, bytes, stream);
  }
  CudaExpertsArgs a;
  a.tokens = count;
  if (peers != nullptr) a.likely_tokens = peers->likely_rows();
  const void* const x = rows.hidden_states.data;
  a.rows = rows.hidden_scale.present()
               ? CudaRows::codes(x, rows.hidden_scale.as<float>(), rows.hidden_scale.strides[1])
           : rows.hidden_states.dtype == DType::kBF16
               ? CudaRows::bf16(x)
               : CudaRows::values(x, rows.hidden_states.dtype);
  a.topk_ids = rows.topk_ids.as<std::int32_t>();
  a.topk_weights = rows.topk_weights.as<float>();
  a.expert_map = expert_map.as<std::int32_t>();
  if (slabs) a.slab_counts = rows.expert_num_tokens.data();
  a.result = plan.ranks.per_slot || slabs ? CudaResult::slots(to.data, to.dtype)
                                          : CudaResult::sum(to.data, to.dtype);
  a.workspace = w.experts;
  a.workspace_bytes = w.experts_bytes;
  if (peers != nullptr && peers->wants_slots()) {
    // The sum is part of sending it.
    a.pair_capacity = pair_capacity;
    const SlotsPlace place = experts->slots_place(a);
    a.result = CudaResult::slots(place.rows);
    a.some_rows = peers->some_rows();
    peers->take_slots(place, a.expert_map);
  }
  return experts->enqueue(stream, a).with_context("experts");
}

// Every rank has the rows: a slot's row is zero on all replicas but one, which a sum brings
// together without a rounding; then they are added in slot order as on one GPU.
Status CudaLayer::Impl::run_slots_here(void* stream, Prepared here, const LayerWorkspace& w) const {
  const std::int64_t tokens = here.hidden_states.dim(0), slots = tokens * plan.routed.top_k;
  const std::int64_t count = slots * plan.latent_size;
  const DType dtype = chosen.slot_dtype();
  const bool bf16 = dtype == DType::kBF16;
  MOESAIC_RETURN_IF_ERROR(
      fill_zero("slots", slot_rows.as<void>(), count * (dtype_bits(dtype) / 8), stream));
  here.expert_output = {
      slot_rows.as<std::byte>(), dtype, {slots, plan.latent_size}, Device::cuda(device)};
  MOESAIC_RETURN_IF_ERROR(run_experts(stream, here, w));
  MOESAIC_RETURN_IF_ERROR(replicas->all_reduce_sum(stream, slot_rows.as<void>(), count, bf16));
  if (!bf16 || plan.latent_size % 8 != 0) {
    SlotSumsParams sums;
    sums.rows = slot_rows.as<void>();
    sums.rows_dtype = dtype;
    sums.ids = here.topk_ids.as<std::int32_t>();
    sums.tokens = tokens;
    sums.hidden = plan.latent_size;
    sums.top_k = static_cast<std::int32_t>(plan.routed.top_k);
    sums.experts = static_cast<std::int32_t>(plan.routed.num_experts);
    sums.output = w.routed;
    sums.dtype = DType::kF32;
    return check_call("combine", launch_slot_sums(sums, stream));
  }
  CombineParams c;
  c.y2 = slot_rows.as<std::uint16_t>();
  c.row_of_pair = here.topk_ids.as<std::int32_t>();  // read for its sign only
  c.tokens = tokens;
  c.top_k = static_cast<std::int32_t>(plan.routed.top_k);
  c.hidden = static_cast<std::int32_t>(plan.latent_size);
  c.output_f32 = true;
  c.output = w.routed;
  return check_call("combine", launch_combine(c, stream));
}

// The last kernel between ranks makes the layer's output: shared experts run while answers travel.
bool CudaLayer::Impl::peers_finish() const {
  return peers != nullptr && transport.get() == peers && plan.ranks.replicas == 1 &&
         (plan.ranks.reduced || plan.ranks.per_slot) && !plan.has_output_transform;
}

// w.routed [M, latent] = what the ranks' experts make of the given rows: all of them, or (not reduced)
// those of the ranks that have other rows. With peers_finish() it is still to be added up.
Status CudaLayer::Impl::run_given(const PrepareArgs& given, const LayerWorkspace& w) const {
  void* const stream = given.stream.handle;
  const TensorView sum(reinterpret_cast<std::byte*>(w.routed), DType::kF32,
                       {given.hidden_states.dim(0), plan.latent_size}, Device::cuda(device));
  if (transport) {
    MOESAIC_ASSIGN_OR_RETURN(const Prepared arrived, transport->prepare(given));
    MOESAIC_RETURN_IF_ERROR(run_experts(stream, arrived, w));
    if (peers_finish()) return peers->answer(given.stream);
    FinalizeArgs f;
    f.output = sum;
    f.expert_output = arrived.expert_output;
    f.topk_weights = given.topk_weights;
    f.topk_ids = given.topk_ids;
    f.stream = given.stream;
    return transport->finalize(f);
  }
  Prepared here;
  here.hidden_states = given.hidden_states;
  here.topk_ids = given.topk_ids;
  here.topk_weights = given.topk_weights;
  if (plan.ranks.per_slot) return run_slots_here(stream, here, w);
  here.expert_output = sum;
  return run_experts(stream, here, w);
}

Result<const void*> CudaLayer::Impl::carried_rows(void* stream, const Rows& rows,
                                                  const LayerWorkspace& w) const {
  const DType row = row_dtype(plan.routed);
  if (row == DType::kBF16) return rows.x_bf16;
  if (rows.x_dtype == row || rows.tokens == 0) return rows.x;
  const std::int64_t count = rows.tokens * plan.hidden_size;
  const auto* wide = static_cast<const float*>(rows.x);
  if (rows.x_dtype != DType::kF32) {
    float* const to = row == DType::kF32 ? w.carried : w.carried_wide;
    MOESAIC_RETURN_IF_ERROR(check_call(
        "dispatch: widen", launch_widen_to_f32(rows.x, rows.x_dtype, count, to, stream)));
    wide = to;
  }
  if (row == DType::kF32) return static_cast<const void*>(wide);
  auto* const to = reinterpret_cast<std::uint16_t*>(w.carried);
  MOESAIC_RETURN_IF_ERROR(
      check_call("dispatch: round", launch_round_to_f16(wide, count, to, stream)));
  return static_cast<const void*>(to);
}

Status CudaLayer::Impl::gather_replicas(void* stream, void* rows, DType dtype,
                                        std::int64_t tokens) const {
  const std::int64_t row_bytes = plan.hidden_size * dtype_bits(dtype) / 8;
  std::vector<std::int64_t> first;
  first.reserve(static_cast<std::size_t>(plan.ranks.replicas) + 1);
  for (int r = 0; r < plan.ranks.replicas; ++r) {
    first.push_back(layer::replica_share(tokens, plan.ranks.replicas, r).first * row_bytes);
  }
  first.push_back(tokens * row_bytes);
  return replicas->gather(stream, static_cast<std::byte*>(rows), first);
}

namespace {

Result<std::int64_t> elements_of_sum(Stream stream, const TensorView& x, int device) {
  if (x.dtype != DType::kF32 && x.dtype != DType::kBF16) {
    return Status(StatusCode::kInvalidDType,
                  fmt::format("x: got {}, need F32 or BF16 on a GPU", dtype_name(x.dtype)));
  }
  MOESAIC_RETURN_IF_ERROR(expect_device("x", x, Device::cuda(device)));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("x", x));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, x.shape.num_elements());
  MOESAIC_RETURN_IF_ERROR(check_not_capturing(stream.handle));
  if (count > 0) MOESAIC_RETURN_IF_ERROR(check_device_pointer("x", x.data, 16, device));
  return count;
}

}  // namespace

Status CudaLayer::sum_over_replicas(Stream stream, const TensorView& x) const {
  const Impl& m = *impl_;
  const DeviceScope scope(m.device);
  const Result<std::int64_t> checked =
      scope.status().ok() ? elements_of_sum(stream, x, m.device) : scope.status();
  const std::int64_t count = checked.ok() ? *checked : 0;
  const bool bf16 = x.dtype == DType::kBF16;
  MOESAIC_RETURN_IF_ERROR(layer::agree(
      *m.mesh->replicas(), "maybe_all_reduce", checked.status(), 2 * count + (bf16 ? 1 : 0),
      "another number of elements, or another dtype,", m.mesh->replica_ranks()));
  if (MOESAIC_FAULT(cuda_layer_parts_stay_parts)) return {};
  // As much at once as there is room for; an element's sum does not depend on it.
  const std::int64_t most = m.max_tokens * m.plan.hidden_size;
  const std::int64_t element = dtype_bits(x.dtype) / 8;
  for (std::int64_t first = 0; first < count; first += most) {
    MOESAIC_RETURN_IF_ERROR(m.mesh->give_up(m.replicas->all_reduce_sum(
        stream.handle, x.data + first * element, std::min(most, count - first), bf16)));
  }
  return {};
}

Status CudaLayer::Impl::run_over_ranks(void* stream, const Rows& rows, const Out& out) const {
  if (out.dtype != DType::kF16) {
    MOESAIC_RETURN_IF_ERROR(run_rows_over_ranks(stream, rows, out));
    return clear_padding(stream, rows, out);
  }
  // The last kernel has bf16 or F32.
  MOESAIC_ASSIGN_OR_RETURN(const LayerWorkspace w, carve(max_tokens));
  float* const wide = w.rows_wide != nullptr ? w.rows_wide : w.carried;
  Out sums = out;
  sums.output = wide;
  sums.dtype = DType::kF32;
  MOESAIC_RETURN_IF_ERROR(run_rows_over_ranks(stream, rows, sums));
  if (rows.tokens == 0) return {};
  MOESAIC_RETURN_IF_ERROR(check_call(
      "output to f16", launch_round_to_f16(wide, rows.tokens * plan.hidden_size,
                                           static_cast<std::uint16_t*>(out.output), stream)));
  return clear_padding(stream, rows, out);
}

Status CudaLayer::Impl::run_rows_over_ranks(void* stream, const Rows& rows, const Out& out) const {
  const layer::RankPlan& ranks = plan.ranks;
  const std::int64_t k = plan.routed.top_k, hidden = plan.hidden_size;
  // Always the whole workspace: rows of other ranks need theirs when this rank has few.
  MOESAIC_ASSIGN_OR_RETURN(LayerWorkspace w, carve(max_tokens));
  MOESAIC_RETURN_IF_ERROR(take_given_logits(stream, rows, out, w));
  if (out.topk_weights != nullptr) w.topk_weights = out.topk_weights;
  if (out.topk_ids != nullptr) w.topk_ids = out.topk_ids;
  MOESAIC_RETURN_IF_ERROR(normalise(stream, rows, w));
  if (rows.tokens > 0)
    MOESAIC_RETURN_IF_ERROR(route(stream, rows, w, /*with_shared=*/false, nullptr));
  MOESAIC_RETURN_IF_ERROR(capture_ids(stream, w.topk_ids, k, rows.tokens));
  const std::int32_t* ids = w.topk_ids;
  MOESAIC_RETURN_IF_ERROR(drop_identity_slots(stream, w, rows.tokens * k, ids));
  if (balance != nullptr) {
    MOESAIC_RETURN_IF_ERROR(balance->map(stream, ids, rows.tokens * k, w.sent_ids));
    ids = w.sent_ids;
  }

  const layer::RowRange all{0, rows.tokens};
  const layer::RowRange share = layer::replica_share(all.count, ranks.replicas, ranks.replica);
  const layer::RowRange given = ranks.reduced ? share : all;
  // Slices of a shared expert are for all rows, a whole one for this rank's.
  const bool sliced = plan.shared_slices > 1;
  const layer::RowRange shared_rows = sliced ? all : share;
  const auto* x_bf16 = static_cast<const std::uint16_t*>(rows.x_bf16);
  const std::int64_t x_bytes = hidden * dtype_bits(rows.x_dtype) / 8;
  const auto* x = static_cast<const std::byte*>(rows.x);
  PrepareArgs args;
  const auto view = [&](const auto* data, DType dtype, std::int64_t columns) {
    return ConstTensorView(
        reinterpret_cast<const std::byte*>(data) + given.first * columns * dtype_bits(dtype) / 8,
        dtype, {given.count, columns}, Device::cuda(device));
  };
  const DType row = row_dtype(plan.routed);
  MOESAIC_ASSIGN_OR_RETURN(const void* carried, carried_rows(stream, rows, w));
  if (w.weighted != nullptr) carried = w.weighted;
  args.hidden_states = view(static_cast<const std::byte*>(carried), row, hidden);
  if (plan.has_input_transform) {
    MOESAIC_RETURN_IF_ERROR(transform_input(stream, args.hidden_states.data, given.count, w));
    args.hidden_states = {reinterpret_cast<const std::byte*>(w.latent),
                          DType::kBF16,
                          {given.count, plan.latent_size},
                          Device::cuda(device)};
  }
  args.topk_ids = view(ids, DType::kI32, k);
  args.topk_weights = view(w.topk_weights, DType::kF32, k);
  args.stream.handle = stream;
  MOESAIC_RETURN_IF_ERROR(run_given(args, w));
  // A transform need not be linear: the parts of all ranks are added up and scaled before it.
  const bool complete = ranks.reduced || ranks.per_slot || plan.has_output_transform;
  if (plan.has_output_transform) {
    if (!ranks.reduced && !ranks.per_slot) {
      MOESAIC_RETURN_IF_ERROR(replicas->all_reduce_sum(
          stream, w.routed, given.count * plan.latent_size, /*bf16=*/false));
    }
    MOESAIC_RETURN_IF_ERROR(transform_output(stream, given.count, w));
  }
  const bool by_itself = out.shared != nullptr;
  if (plan.adds_shared && shared_rows.count > 0) {
    // The routed experts are through with the workspace that both use.
    const Rows part = {x + shared_rows.first * x_bytes, rows.x_dtype,
                       x_bf16 + shared_rows.first * hidden, shared_rows.count};
    auto* const to =
        static_cast<std::byte*>(out.shared) +
        (by_itself ? shared_rows.first * hidden * (dtype_bits(out.shared_dtype) / 8) : 0);
    MOESAIC_RETURN_IF_ERROR(
        by_itself ? shared_apart(stream, part, w, to, out.shared_dtype, /*kept=*/false, {})
                  : shared_to_workspace(stream, part, w, /*kept=*/false, {}));
  }
  if (by_itself && ranks.replicas > 1 && !MOESAIC_FAULT(layer_shared_part_stays_partial)) {
    MOESAIC_RETURN_IF_ERROR(
        sliced ? replicas->all_reduce_sum(stream, out.shared, all.count * hidden, /*bf16=*/false)
               : gather_replicas(stream, out.shared, out.shared_dtype, all.count));
  }

  const auto combine = [&](const LayerCombineParams& p) {
    return check_call("combine", launch_layer_combine(p, stream));
  };
  LayerCombineParams p;
  p.hidden = hidden;
  p.scale = plan.has_output_transform ? 1.0F : plan.output_scale;
  if (plan.adds_shared && !by_itself) add_shared(w, p);
  const auto to_output = [&](const layer::RowRange& mine, bool zero_experts) {
    p.tokens = mine.count;
    p.zero_weight = zero_experts ? w.zero_weight + mine.first : nullptr;
    p.x = x + mine.first * x_bytes;
    p.x_dtype = rows.x_dtype;
    p.output_f32 = out.dtype == DType::kF32;
    p.output =
        static_cast<std::byte*>(out.output) + mine.first * hidden * (dtype_bits(out.dtype) / 8);
    return peers_finish() ? peers->finish({stream}, p) : combine(p);
  };
  if (complete) {
    // Without shared experts every replica can finish what it was given by itself.
    const layer::RowRange mine = plan.adds_shared ? share : given;
    p.routed = (plan.has_output_transform ? w.routed_back : w.routed) +
               (mine.first - given.first) * hidden;
    MOESAIC_RETURN_IF_ERROR(to_output(mine, plan.has_zero_experts));
    const bool shared_out = plan.adds_shared || ranks.reduced;
    return shared_out && ranks.replicas > 1
               ? gather_replicas(stream, out.output, out.dtype, all.count)
               : Status();
  }

  // Partial sums, and with them the shared experts of this rank's share, are added up once.
  p.routed = w.routed;
  p.output = w.routed;
  p.output_f32 = true;
  if (p.scale != 1.0F) {
    LayerCombineParams scaled = p;
    scaled.shared = nullptr;
    scaled.tokens = all.count;
    MOESAIC_RETURN_IF_ERROR(combine(scaled));
    p.scale = 1.0F;
  }
  if (p.shared != nullptr) {
    p.tokens = shared_rows.count;
    p.routed = w.routed + shared_rows.first * hidden;
    p.output = w.routed + shared_rows.first * hidden;
    MOESAIC_RETURN_IF_ERROR(combine(p));
    p.shared = nullptr;
  }
  if (!ranks.leaves_sum) {
    MOESAIC_RETURN_IF_ERROR(
        replicas->all_reduce_sum(stream, w.routed, all.count * hidden, /*bf16=*/false));
    p.routed = w.routed;
    return to_output(all, plan.has_zero_experts);
  }
  // The identity experts of a row enter once: with the rank whose share it is in.
  for (const layer::RowRange& mine :
       {layer::RowRange{0, share.first}, share,
        layer::RowRange{share.first + share.count, all.count - share.first - share.count}}) {
    p.routed = w.routed + mine.first * hidden;
    MOESAIC_RETURN_IF_ERROR(to_output(mine, plan.has_zero_experts && mine.first == share.first));
  }
  return {};
}

}  // namespace moesaic::cuda
