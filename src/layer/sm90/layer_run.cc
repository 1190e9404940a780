// The steps of a CudaLayer's call on rows that are all this GPU's: launches only.
#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "core/fault.h"
#include "experts/sm90/grouped_gemm.h"
#include "layer/sm90/layer_impl.h"
#include "layer/sm90/layer_ops.h"
#include "layer/sm90/norm_rows.h"
#include "prepare_finalize/sm90/rank_rows.h"
#include "router/sm90/routing_ops.h"

namespace moesaic::cuda {

Result<LayerWorkspace> CudaLayer::Impl::carve(std::int64_t tokens) const {
  Arena arena({workspace.as<std::byte>(), static_cast<std::size_t>(workspace.bytes())});
  return LayerWorkspace::carve(plan, shared_gate.has_value(), tokens, arena);
}

Result<ProloguePlace> CudaLayer::Impl::prologue_place(std::int64_t tokens, DType x_dtype,
                                                      bool with_shared) const {
  MOESAIC_ASSIGN_OR_RETURN(const LayerWorkspace w, carve(tokens));
  CudaExpertsArgs a = routed_args({nullptr, x_dtype, nullptr, tokens}, w);
  CudaRouterArgs r;
  r.tokens = tokens;
  if (with_shared) a.top_k = 0;
  const std::optional<RouteParams> rule = (with_shared ? joined_router : router)->usual(r);
  PrologueFacts facts;
  // A function of the caller's stands between the kernels.
  facts.experts_have_prologue = !plan.has_input_transform && plan.routing.num_zero_experts == 0 &&
                                plan.routing.method != RoutingMethod::kCustom &&
                                experts->prologue(a).has_value();
  // Behind the gate of normalised rows their factors act on the logits.
  facts.gate_runs_prologue =
      gate && plan.input_norm_eps == 0 && gate->runs_prologue(x_dtype, tokens);
  facts.router_rule_moves = rule.has_value();
  facts.experts_route = rule && experts->can_route(*rule);
  return choose_prologue_place(facts);
}

Status CudaLayer::Impl::make_prologue_plans() {
  if (!experts) return {};
  // Calls with more pairs than that have no prologue.
  const std::int64_t most = std::min<std::int64_t>(max_tokens, kListPairs);
  for (const bool with_shared : {false, true}) {
    if (with_shared && !joins) continue;
    for (std::int64_t tokens = 1; tokens <= most; ++tokens) {
      MOESAIC_ASSIGN_OR_RETURN(const ProloguePlace bf16,
                               prologue_place(tokens, DType::kBF16, with_shared));
      MOESAIC_ASSIGN_OR_RETURN(const ProloguePlace f16,
                               prologue_place(tokens, DType::kF16, with_shared));
      MOESAIC_ASSIGN_OR_RETURN(const ProloguePlace f32,
                               prologue_place(tokens, DType::kF32, with_shared));
      (with_shared ? joined : apart).add(bf16, f16, f32);
    }
  }
  return {};
}

Status CudaLayer::Impl::route(void* stream, const Rows& rows, const LayerWorkspace& w,
                              bool with_shared, CudaExpertsArgs* next) const {
  const Given& given = rows.given;
  if (given.ids != nullptr) {
    TakeRoutingParams p;
    p.weights = given.weights;
    p.ids = given.ids;
    p.ids_dtype = given.ids_dtype;
    p.padding = given.padding;
    p.tokens = rows.tokens;
    p.top_k = static_cast<std::int32_t>(plan.routing.top_k);
    p.num_shared = with_shared ? 1 : 0;
    p.num_experts = static_cast<std::int32_t>(plan.routing.num_experts);
    p.zero_experts = static_cast<std::int32_t>(plan.routing.num_zero_experts);
    p.topk_weights = w.topk_weights;
    p.topk_ids = w.topk_ids;
    p.zero_weight = w.zero_weight;
    return check_call("routing", launch_take_routing(p, stream));
  }
  const CudaRouter& with = *(with_shared ? joined_router : router);
  CudaRouterArgs r;
  r.tokens = rows.tokens;
  r.router_logits = w.logits;
  if (given.logits != nullptr && w.logits == nullptr) {  // taken as they are
    r.router_logits = given.logits;
    r.logits_dtype = given.logits_dtype;
  }
  r.hidden_states = {static_cast<const std::byte*>(rows.x_bf16),
                     DType::kBF16,
                     {rows.tokens, plan.hidden_size},
                     Device::cuda(device)};
  r.input_ids = given.input_ids;
  r.padding_mask = given.padding;
  r.topk_weights = w.topk_weights;
  r.topk_ids = w.topk_ids;
  r.zero_expert_weight = w.zero_weight;
  ProloguePlace how = next == nullptr
                          ? ProloguePlace::kInExperts
                          : (with_shared ? joined : apart).of(rows.tokens, rows.x_dtype);
  // Without a gate in front, or with rows to leave out, the router's kernel runs it: it always can.
  if (how == ProloguePlace::kInGate && (given.logits != nullptr || given.padding != nullptr)) {
    how = ProloguePlace::kInRouter;
  }
  std::optional<ExpertsPrologue> prologue;
  if (how != ProloguePlace::kInExperts) {
    prologue = experts->prologue(*next);
    // Experts whose static scales may have come to differ since the layer was made have none.
    const bool forgets = MOESAIC_FAULT(cuda_layer_prologue_of_experts_without);
    if (prologue || forgets) next->in_front.emplace();
    if (!prologue) how = forgets ? ProloguePlace::kInRouter : ProloguePlace::kInExperts;
  }
  if (how == ProloguePlace::kInGate) {
    next->in_front->route = with.usual(r);
    return gate->enqueue(stream, rows.x, rows.x_dtype, rows.tokens, w.logits, &*prologue);
  }
  if (given.logits == nullptr) {
    const bool normed = w.normed != nullptr;
    const bool scaled = normed && rows.x_dtype == DType::kBF16;
    MOESAIC_RETURN_IF_ERROR(gate->enqueue(
        stream, normed ? w.normed : rows.x, normed && !scaled ? DType::kF32 : rows.x_dtype,
        rows.tokens, w.logits, nullptr, scaled ? w.row_factors : nullptr));
  }
  return with.enqueue(stream, r, prologue ? &*prologue : nullptr);
}

Status CudaLayer::Impl::normalise(void* stream, const Rows& rows, const LayerWorkspace& w) const {
  if (plan.input_norm_eps == 0) return {};
  NormRowsParams p;
  p.x = rows.x;
  p.x_dtype = rows.x_dtype;
  p.tokens = rows.tokens;
  p.hidden = plan.hidden_size;
  p.eps = plan.input_norm_eps;
  p.weight = experts_norm_weight.as<float>();
  const bool routes = rows.given.ids == nullptr && rows.given.logits == nullptr;
  if (routes && rows.x_dtype == DType::kBF16) {  // the gate alone reads them
    p.scaled = reinterpret_cast<std::uint16_t*>(w.normed);
    p.factors = w.row_factors;
  } else if (routes) {
    p.normed = w.normed;
  }
  p.weighted = w.weighted;
  p.weighted_dtype = w.weighted_dtype;
  return check_call("input norm", launch_norm_rows(p, stream));
}

Status CudaLayer::Impl::take_given_logits(void* stream, const Rows& rows, const Out& out,
                                          LayerWorkspace& w) const {
  if (out.logits != nullptr) w.logits = out.logits;
  const Given& given = rows.given;
  if (given.logits == nullptr || given.logits == w.logits) return {};
  if (out.logits == nullptr) {
    w.logits = nullptr;  // the router reads the caller's, of whatever dtype
    return {};
  }
  const std::int64_t columns = plan.routing.num_experts + plan.routing.num_zero_experts;
  return check_call("router_logits", launch_widen_to_f32(given.logits, given.logits_dtype,
                                                         rows.tokens * columns, w.logits, stream));
}

Status CudaLayer::Impl::clear_padding(void* stream, const Rows& rows, const Out& out) const {
  if (rows.given.padding == nullptr) return {};
  const auto clear = [&](void* to, DType dtype) {
    if (to == nullptr) return Status();
    const std::int64_t row_bytes = plan.hidden_size * dtype_bits(dtype) / 8;
    return check_call("padding_mask",
                      launch_clear_rows(rows.given.padding, rows.tokens, row_bytes, to, stream));
  };
  MOESAIC_RETURN_IF_ERROR(clear(out.output, out.dtype));
  return clear(out.shared, out.shared_dtype);
}

Status CudaLayer::Impl::measure(void* stream, const GpuExperts& experts, const CudaExpertsArgs& a,
                                double factor, std::span<RowNumerics> numerics) {
  if (numerics.empty()) return {};
  MOESAIC_RETURN_IF_ERROR(synchronize(stream));
  std::vector<RowNumerics> part(numerics.size());
  MOESAIC_RETURN_IF_ERROR(experts.add_numerics(a, part));
  for (std::size_t t = 0; t < part.size(); ++t) numerics[t].add(part[t], factor);
  return {};
}

Status CudaLayer::Impl::run_shared(void* stream, const Rows& rows, const LayerWorkspace& w,
                                   const CudaResult& to, bool kept,
                                   std::span<RowNumerics> numerics) const {
  CudaExpertsArgs a;
  const GpuExperts& experts_of_all = *(joins ? experts : shared);
  a.tokens = rows.tokens;
  a.rows = kept ? CudaRows::kept(rows.x_bf16) : rows_of(experts_of_all, rows);
  a.topk_ids = shared_ids.as<std::int32_t>();
  a.topk_weights = ones.as<float>();
  if (shared_gate) {
    MOESAIC_RETURN_IF_ERROR(
        shared_gate->enqueue(stream, rows.x, rows.x_dtype, rows.tokens, w.shared_logits));
    CudaRouterArgs r;
    r.tokens = rows.tokens;
    r.router_logits = w.shared_logits;
    r.topk_weights = w.shared_weights;
    r.topk_ids = w.shared_ids;
    r.keeps_nan = !MOESAIC_FAULT(cuda_layer_shared_gate_drops_nan);
    MOESAIC_RETURN_IF_ERROR(shared_router->enqueue(stream, r));
    a.topk_ids = w.shared_ids;
    a.topk_weights = w.shared_weights;
  }
  a.result = to;
  a.workspace = w.shared;
  // Where both join, a part that is wanted apart is computed in the memory of the joined call.
  a.workspace_bytes = joins ? std::max(w.shared_bytes, w.experts_bytes) : w.shared_bytes;
  a.top_k = 1;
  a.used_experts = 1;
  a.expert_map = joins ? expert_map.as<std::int32_t>() : nullptr;
  MOESAIC_RETURN_IF_ERROR(experts_of_all.enqueue(stream, a).with_context("shared_experts"));
  return measure(stream, experts_of_all, a, 1.0, numerics);
}

CudaExpertsArgs CudaLayer::Impl::routed_args(const Rows& rows, const LayerWorkspace& w) const {
  CudaExpertsArgs a;
  a.tokens = rows.tokens;
  a.rows = rows_of(*experts, rows);
  if (w.weighted != nullptr && !MOESAIC_FAULT(cuda_layer_experts_see_raw_rows)) {
    a.rows = CudaRows::values(w.weighted, w.weighted_dtype);
  }
  a.topk_ids = w.topk_ids;
  a.topk_weights = w.topk_weights;
  a.top_k = plan.routed.top_k;
  a.expert_map = expert_map.as<std::int32_t>();
  a.workspace = w.experts;
  a.workspace_bytes = w.experts_bytes;
  return a;
}

Status CudaLayer::Impl::run_routed(void* stream, CudaExpertsArgs a, const void* shared_rows,
                                   void* to, DType dtype, std::span<RowNumerics> numerics) const {
  a.result = CudaResult::sum(to, dtype, shared_rows);
  MOESAIC_RETURN_IF_ERROR(experts->enqueue(stream, a).with_context("experts"));
  return measure(stream, *experts, a, static_cast<double>(plan.output_scale), numerics);
}

Status CudaLayer::Impl::run(void* stream, const Rows& rows, const Out& out) const {
  float* wide = nullptr;
  if (out.dtype == DType::kF16 && (takes_rounded_rows() || !joins_call(rows, out))) {
    MOESAIC_ASSIGN_OR_RETURN(const LayerWorkspace w, carve(rows.tokens));
    wide = w.routed_back != nullptr ? w.routed_back : w.routed;
    if (wide == nullptr) wide = w.rows_wide;
  }
  if (wide != nullptr) {
    // The last kernel has bf16 or F32.
    Out sums = out;
    sums.output = wide;
    sums.dtype = DType::kF32;
    MOESAIC_RETURN_IF_ERROR(run_rows(stream, rows, sums));
    MOESAIC_RETURN_IF_ERROR(check_call(
        "output to f16", launch_round_to_f16(wide, rows.tokens * plan.hidden_size,
                                             static_cast<std::uint16_t*>(out.output), stream)));
  } else {
    MOESAIC_RETURN_IF_ERROR(run_rows(stream, rows, out));
  }
  return clear_padding(stream, rows, out);
}

// One slot per token, and every one has an expert here: its weighted rows are the sums.
Status CudaLayer::Impl::shared_to_workspace(void* stream, const Rows& rows, const LayerWorkspace& w,
                                            bool kept, std::span<RowNumerics> numerics) const {
  if (!plan.has_shared) return shared_function(stream, rows, w.shared_sums);
  return run_shared(stream, rows, w, CudaResult::slots(w.shared_rows, w.shared_dtype), kept,
                    numerics);
}

Status CudaLayer::Impl::shared_apart(void* stream, const Rows& rows, const LayerWorkspace& w,
                                     void* to, DType dtype, bool kept,
                                     std::span<RowNumerics> numerics) const {
  if (plan.has_shared) {
    return run_shared(stream, rows, w, CudaResult::sum(to, dtype), kept, numerics);
  }
  if (dtype == DType::kF32) return shared_function(stream, rows, static_cast<float*>(to));
  MOESAIC_RETURN_IF_ERROR(shared_function(stream, rows, w.shared_sums));
  return check_call("shared_output",
                    launch_round_to_bf16(w.shared_sums, DType::kF32, rows.tokens * plan.hidden_size,
                                         static_cast<std::uint16_t*>(to), stream));
}

void CudaLayer::Impl::add_shared(const LayerWorkspace& w, LayerCombineParams& to) const {
  if (MOESAIC_FAULT(layer_omit_shared)) return;
  to.shared = plan.has_shared ? static_cast<const void*>(w.shared_rows) : w.shared_sums;
  to.shared_dtype = plan.has_shared ? w.shared_dtype : DType::kF32;
}

// A bf16 sum without factors takes the shared rows out of the output, where they were put first: no
// buffer for them. Otherwise the shared rows are made last, in memory that the experts left, and
// one kernel adds everything to the fp32 sum of the experts. Both round the same fp32 sums.
Status CudaLayer::Impl::run_rows(void* stream, const Rows& rows, const Out& out) const {
  MOESAIC_ASSIGN_OR_RETURN(LayerWorkspace w, carve(rows.tokens));
  MOESAIC_RETURN_IF_ERROR(take_given_logits(stream, rows, out, w));
  MOESAIC_RETURN_IF_ERROR(normalise(stream, rows, w));
  if (joins_call(rows, out)) return run_joined(stream, rows, w, out);
  const bool shared_too = plan.adds_shared && out.shared == nullptr;
  const bool measured = !out.numerics.empty();  // then the work list must be in memory
  if (out.topk_weights != nullptr) w.topk_weights = out.topk_weights;
  if (out.topk_ids != nullptr) w.topk_ids = out.topk_ids;
  if (beside && !measured) return run_beside(stream, rows, w, out);
  CudaExpertsArgs args = routed_args(rows, w);
  // A shared expert by itself would use the same workspace in between.
  const bool keeps = plan.has_shared && !plan.has_input_transform && plan.input_norm_eps == 0 &&
                     !beside && (joins ? experts : shared)->same_rows(*experts);
  MOESAIC_RETURN_IF_ERROR(
      route(stream, rows, w, /*with_shared=*/false, plan.has_shared || measured ? nullptr : &args));
  MOESAIC_RETURN_IF_ERROR(drop_identity_slots(stream, w, rows.tokens * args.top_k, args.topk_ids));
  if (plan.has_input_transform) {
    MOESAIC_RETURN_IF_ERROR(transform_input(stream, rows.x_bf16, rows.tokens, w));
    args.rows = CudaRows::bf16(w.latent);
  }
  const auto shared_part = [&] {
    return out.shared == nullptr
               ? Status()
               : shared_apart(stream, rows, w, out.shared, out.shared_dtype, keeps, out.numerics);
  };
  if (w.routed == nullptr && (out.dtype == DType::kBF16 || !shared_too)) {
    if (shared_too) {
      MOESAIC_RETURN_IF_ERROR(run_shared(stream, rows, w, CudaResult::slots(out.output),
                                         /*kept=*/false, out.numerics));
      if (keeps) args.rows = CudaRows::kept(rows.x_bf16);
    }
    MOESAIC_RETURN_IF_ERROR(run_routed(stream, args, shared_too ? out.output : nullptr, out.output,
                                       out.dtype, out.numerics));
    MOESAIC_RETURN_IF_ERROR(shared_part());
    return capture_ids(stream, w.topk_ids, plan.routed.top_k, rows.tokens);
  }
  float* const sum = w.routed != nullptr ? w.routed : static_cast<float*>(out.output);
  MOESAIC_RETURN_IF_ERROR(run_routed(stream, args, nullptr, sum, DType::kF32, out.numerics));
  MOESAIC_RETURN_IF_ERROR(shared_part());
  if (shared_too) {
    MOESAIC_RETURN_IF_ERROR(shared_to_workspace(stream, rows, w, keeps, out.numerics));
  }
  return finish_rows(stream, rows, w, sum, shared_too, out);
}

Status CudaLayer::Impl::drop_identity_slots(void* stream, const LayerWorkspace& w,
                                            std::int64_t slots, const std::int32_t*& ids) const {
  if (plan.routing.num_zero_experts == 0 || MOESAIC_FAULT(cuda_layer_identity_slots_are_computed))
    return {};
  MOESAIC_RETURN_IF_ERROR(check_call(
      "routing", launch_drop_weightless(w.topk_ids, w.topk_weights, slots, w.sent_ids, stream)));
  ids = w.sent_ids;
  return {};
}

Status CudaLayer::Impl::finish_rows(void* stream, const Rows& rows, const LayerWorkspace& w,
                                    float* sum, bool with_shared, const Out& out) const {
  LayerCombineParams p;
  p.scale = plan.output_scale;
  if (plan.has_output_transform) {
    MOESAIC_RETURN_IF_ERROR(transform_output(stream, rows.tokens, w));
    sum = w.routed_back;
    p.scale = 1.0F;
  }
  if (with_shared) add_shared(w, p);
  p.routed = sum;
  p.zero_weight = plan.has_zero_experts ? w.zero_weight : nullptr;
  p.x = rows.x;
  p.x_dtype = rows.x_dtype;
  p.tokens = rows.tokens;
  p.hidden = plan.hidden_size;
  p.output = out.output;
  p.output_f32 = out.dtype == DType::kF32;
  MOESAIC_RETURN_IF_ERROR(check_call("combine", launch_layer_combine(p, stream)));
  return capture_ids(stream, w.topk_ids, plan.routed.top_k, rows.tokens);
}

Status CudaLayer::Impl::run_routed_part(void* stream, const Rows& rows,
                                        const LayerWorkspace& w) const {
  CudaExpertsArgs args = routed_args(rows, w);
  MOESAIC_RETURN_IF_ERROR(route(stream, rows, w, /*with_shared=*/false, &args));
  MOESAIC_RETURN_IF_ERROR(drop_identity_slots(stream, w, rows.tokens * args.top_k, args.topk_ids));
  if (plan.has_input_transform) {
    MOESAIC_RETURN_IF_ERROR(transform_input(stream, rows.x_bf16, rows.tokens, w));
    args.rows = CudaRows::bf16(w.latent);
  }
  return run_routed(stream, args, nullptr, w.routed, DType::kF32, {});
}

Status CudaLayer::Impl::run_beside(void* stream, const Rows& rows, LayerWorkspace& w,
                                   const Out& out) const {
  const std::lock_guard<std::mutex> lock(beside->mutex);
  MOESAIC_ASSIGN_OR_RETURN(SideStream* const other, beside->streams.beside(stream));
  void* const side = other->handle();
  MOESAIC_RETURN_IF_ERROR(other->fork(stream));
  Status shared_status =
      out.shared != nullptr
          ? shared_apart(side, rows, w, out.shared, out.shared_dtype, /*kept=*/false, {})
          : shared_to_workspace(side, rows, w, /*kept=*/false, {});
  const Status routed_status = run_routed_part(stream, rows, w);
  // In any case: a capture must not end with work that has not come back.
  MOESAIC_RETURN_IF_ERROR(other->join(stream));
  MOESAIC_RETURN_IF_ERROR(shared_status);
  MOESAIC_RETURN_IF_ERROR(routed_status);
  return finish_rows(stream, rows, w, w.routed, out.shared == nullptr, out);
}

// One more slot per token; a trace gets the slots before it.
Status CudaLayer::Impl::run_joined(void* stream, const Rows& rows, const LayerWorkspace& w,
                                   const Out& out) const {
  CudaExpertsArgs a = routed_args(rows, w);
  a.top_k = 0;  // the experts' own: the joined one's slot too
  MOESAIC_RETURN_IF_ERROR(
      route(stream, rows, w, /*with_shared=*/true, out.numerics.empty() ? &a : nullptr));
  MOESAIC_RETURN_IF_ERROR(run_routed(stream, a, nullptr, out.output, out.dtype, out.numerics));
  const std::int64_t k = plan.routed.top_k;
  const auto report = [&](std::string_view field, void* to, const void* from) {
    return to == nullptr ? Status()
                         : copy_rows_on_device(field, to, k * 4, from, (k + 1) * 4, k * 4,
                                               rows.tokens, stream);
  };
  MOESAIC_RETURN_IF_ERROR(report("trace.topk_weights", out.topk_weights, w.topk_weights));
  MOESAIC_RETURN_IF_ERROR(report("trace.topk_ids", out.topk_ids, w.topk_ids));
  return capture_ids(stream, w.topk_ids, k + 1, rows.tokens);
}

}  // namespace moesaic::cuda
