// What of a layer runs on a GPU, and the workspace, without a device: part of every build.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "experts/cuda_general/general_experts.h"
#include "experts/cuda_general/gpu_backends.h"
#include "experts/sm90/experts.h"
#include "layer/sm90/layer.h"
#include "permute/sm90/align.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/peer_rows.h"
#include "quant/compute_scheme.h"
#include "router/sm90/router.h"

namespace moesaic::cuda {
namespace {

constexpr std::int64_t kAlignment = 256;

// The arena aligns to 64 bytes; sizes that are multiples of 256 keep every piece at 256.
template <class T>
T* take(Arena& arena, std::int64_t count) {
  return arena.take<T>(round_up(count, kAlignment / static_cast<std::int64_t>(sizeof(T))));
}

Status rows_can_implement(const layer::FusedPlan& plan, const FusedMoE::Options& options) {
  const layer::RankPlan& ranks = plan.ranks;
  if (options.ranks.enable_eplb && !ranks.active) {
    return unsupported(
        "enable_eplb: got true on a GPU without a communicator, need one, or the CPU");
  }
  const DType rows = quant::operand_dtype(plan.routed.activation_dtype, plan.routed.quant.kind);
  if (plan.has_input_transform && rows != DType::kBF16) {
    return unsupported(fmt::format(
        "activation_dtype: got {} with an input transform on a GPU, need BF16", dtype_name(rows)));
  }
  if (!ranks.active) return {};
  if (const DType row = row_dtype(plan.routed); plan.input_norm_eps > 0 && row != DType::kBF16) {
    return unsupported(
        fmt::format("activation_dtype: got {} with an input norm over ranks on GPUs, need BF16",
                    dtype_name(row)));
  }
  if (ranks.per_slot && ranks.transport == RankTransport::kGather && ranks.replicas > 1) {
    return unsupported(
        fmt::format("reduction: got per_slot with transport gather and {} ranks with the same rows "
                    "on a GPU, need per_rank, or all_to_all",
                    ranks.replicas));
  }
  return {};
}

}  // namespace

Status CudaLayer::can_implement(const layer::FusedPlan& plan, const FusedMoE::Options& options) {
  MOESAIC_RETURN_IF_ERROR(rows_can_implement(plan, options));
  MOESAIC_RETURN_IF_ERROR(CudaRouter::can_implement(plan.routing).with_context("router"));
  MOESAIC_ASSIGN_OR_RETURN(const LayerExperts chosen, choose_layer_experts(plan));
  MOESAIC_RETURN_IF_ERROR(pair_capacity_of(plan, chosen).status());
  const DType rows = row_dtype(plan.routed);
  if (!plan.ranks.active || rows == DType::kBF16 || chosen.all_wide()) return {};
  return unsupported(fmt::format(
      "activation_dtype: got {} over ranks on GPUs, need BF16, or experts that take it ({})",
      dtype_name(rows), kGeneralExpertsName));
}

bool takes_any_rows(const layer::FusedPlan& plan, const LayerExperts& chosen) {
  const bool routes = plan.routing.method == RoutingMethod::kCustom &&
                      !MOESAIC_FAULT(cuda_layer_routes_by_rows_of_any_dtype);
  const bool bf16_function =
      routes || plan.has_input_transform || (plan.adds_shared && !plan.has_shared);
  const bool travel = !plan.ranks.active || row_dtype(plan.routed) != DType::kBF16;
  return travel && !bf16_function && chosen.all_wide();
}

bool rounds_rows(const layer::FusedPlan& plan, const LayerExperts& chosen) {
  return plan.rows_dtype != DType::kBF16 && !takes_any_rows(plan, chosen);
}

DType normed_dtype(const layer::FusedPlan& plan, const LayerExperts& chosen) {
  return chosen.routed_wide && row_dtype(plan.routed) != DType::kBF16 ? DType::kF32 : DType::kBF16;
}

Result<LayerExperts> choose_layer_experts(const layer::FusedPlan& plan) {
  LayerExperts chosen;
  const auto choose = [&](const MoeProblem& problem, std::string_view stage, const GpuBackend*& to,
                          bool& wide) -> Status {
    const Result<const GpuBackend*> row = choose_gpu_backend(problem, plan.backend);
    if (!row.ok()) return row.status().with_context(stage);
    to = *row;
    wide = to->takes_any_rows(problem);
    return {};
  };
  MOESAIC_RETURN_IF_ERROR(choose(plan.routed, "experts", chosen.routed, chosen.routed_wide));
  if (plan.has_shared) {
    MOESAIC_RETURN_IF_ERROR(
        choose(plan.shared, "shared_experts", chosen.shared, chosen.shared_wide));
  }
  return chosen;
}

Result<std::int64_t> pair_capacity_of(const layer::FusedPlan& plan, const LayerExperts& chosen) {
  const std::int64_t wanted = plan.ranks.pair_capacity;
  if (wanted == 0) return std::int64_t{0};
  const auto needs = [&](const std::string& what) {
    return unsupported(fmt::format("pair_capacity: got {}, need {}", wanted, what));
  };
  if (chosen.routed->name != kCudaExpertsName) {
    return needs(fmt::format("experts {} (these are {})", kCudaExpertsName, chosen.routed->name));
  }
  if (carried_problem(plan.routed).hidden_size != plan.routed.hidden_size) {
    return needs(
        fmt::format("a hidden size that is not padded (this is {})", plan.routed.hidden_size));
  }
  if (plan.routed.top_k > kPeerMostSlots) {
    return needs(
        fmt::format("top_k of at most {} (this is {})", kPeerMostSlots, plan.routed.top_k));
  }
  // Shorter lists are made otherwise, and are no memory to speak of.
  const std::int64_t capacity = std::max<std::int64_t>(wanted, kOneBlockPairs);
  const auto all = checked_mul(plan.ranks.experts_rows, plan.routed.top_k);
  return all && *all <= capacity ? 0 : capacity;
}

bool shared_joins(const layer::FusedPlan& plan, bool gated_shared) {
  const MoeProblem &r = plan.routed, &s = plan.shared;
  const bool alike = plan.has_shared && !gated_shared && r.hidden_size == s.hidden_size &&
                     r.intermediate_size == s.intermediate_size &&
                     r.quant.weight == s.quant.weight && r.quant.forms == s.quant.forms &&
                     r.quant.activation == s.quant.activation &&
                     r.activation_dtype == s.activation_dtype && r.activation == s.activation;
  // Over ranks each computes the shared expert for its own rows, the routed ones for others' too;
  // transforms are the routed experts' alone; and a function that routes knows no slot for it.
  const bool fast = plan.backend.empty() || plan.backend == kCudaExpertsName;
  if (!alike || !fast || plan.ranks.active || plan.has_input_transform ||
      plan.has_output_transform || plan.input_norm_eps > 0 ||
      plan.routing.method == RoutingMethod::kCustom || r.has_expert_bias ||
      r.apply_router_weight_on_input || plan.routing.num_zero_experts > 0 ||
      plan.output_scale != 1.0F) {
    return false;
  }
  MoeProblem joined = r;
  ++joined.num_experts;
  ++joined.num_local_experts;
  ++joined.top_k;
  return CudaExperts::can_implement(joined).ok();
}

MoeProblem experts_problem(const layer::FusedPlan& plan, bool gated_shared) {
  MoeProblem p = plan.routed;
  if (!shared_joins(plan, gated_shared)) return p;
  ++p.num_experts;
  ++p.num_local_experts;
  ++p.top_k;
  return p;
}

Result<LayerWorkspace> LayerWorkspace::carve(const layer::FusedPlan& plan, bool gated_shared,
                                             std::int64_t tokens, Arena& arena) {
  LayerWorkspace w;
  const std::int64_t k = plan.routed.top_k;
  w.logits =
      take<float>(arena, tokens * (plan.routing.num_experts + plan.routing.num_zero_experts));
  const bool joins = shared_joins(plan, gated_shared);
  w.topk_weights = take<float>(arena, tokens * (joins ? k + 1 : k));
  w.topk_ids = take<std::int32_t>(arena, tokens * (joins ? k + 1 : k));
  if (plan.routing.num_zero_experts > 0) w.zero_weight = take<float>(arena, tokens);
  if (plan.has_shared && gated_shared) {
    w.shared_logits = take<float>(arena, tokens);
    w.shared_weights = take<float>(arena, tokens);
    w.shared_ids = take<std::int32_t>(arena, tokens);
  }
  const bool spread = plan.ranks.active;
  const bool shared_function = plan.adds_shared && !plan.has_shared;
  // What is added to the routed sum is made beside it, or of rows that the sum must not overwrite.
  const bool keeps_sum = plan.adds_shared &&
                         (plan.shared_stream ||
                          (plan.inplace && !MOESAIC_FAULT(cuda_layer_in_place_of_rows_still_read)));
  MOESAIC_ASSIGN_OR_RETURN(const LayerExperts with, choose_layer_experts(plan));
  const bool has_sums = keeps_sum || plan.output_scale != 1.0F || plan.has_zero_experts ||
                        plan.has_output_transform || shared_function || spread ||
                        (plan.has_shared && with.any_wide());
  if (has_sums) {
    w.routed = take<float>(arena, tokens * plan.latent_size);
  }
  if (plan.has_input_transform) w.latent = take<std::uint16_t>(arena, tokens * plan.latent_size);
  if (plan.input_norm_eps > 0) {
    if (plan.has_gate) {
      w.normed = take<float>(arena, tokens * plan.hidden_size);
      w.row_factors = take<float>(arena, tokens);
    }
    w.weighted_dtype = normed_dtype(plan, with);
    w.weighted =
        take<std::byte>(arena, tokens * plan.hidden_size * (dtype_bits(w.weighted_dtype) / 8));
  }
  if (plan.has_output_transform) w.routed_back = take<float>(arena, tokens * plan.hidden_size);
  if (shared_function) w.shared_sums = take<float>(arena, tokens * plan.hidden_size);
  if (rounds_rows(plan, with)) {
    w.rows_bf16 = take<std::uint16_t>(arena, tokens * plan.hidden_size);
    if (!has_sums || spread) w.rows_wide = take<float>(arena, tokens * plan.hidden_size);
  }
  if (const DType row = row_dtype(plan.routed); spread && row != DType::kBF16) {
    w.carried = take<float>(arena, tokens * plan.hidden_size);
    if (row == DType::kF16) w.carried_wide = take<float>(arena, tokens * plan.hidden_size);
  }
  if (spread || plan.routing.num_zero_experts > 0)
    w.sent_ids = take<std::int32_t>(arena, tokens * k);
  // Sizes grow with tokens: a larger call's workspace holds every smaller call.
  MoeProblem problem = experts_problem(plan, gated_shared);
  std::int64_t rows_bytes = 0;
  if (joins) {
    MOESAIC_ASSIGN_OR_RETURN(w.experts_bytes,
                             CudaExperts::workspace_size(problem, std::min(tokens, kJoinedTokens)));
  }
  if (!joins || tokens > kJoinedTokens) {
    problem.top_k = k;
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t capacity, pair_capacity_of(plan, with));
    const std::int64_t rows = spread ? plan.ranks.experts_rows : tokens;
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t apart,
                             capacity > 0 ? CudaExperts::workspace_size(problem, rows, capacity)
                                          : with.routed->workspace_size(problem, rows));
    w.experts_bytes = std::max(w.experts_bytes, apart);
    if (plan.has_shared) {
      if (joins) problem.top_k = 1;
      MOESAIC_ASSIGN_OR_RETURN(w.shared_bytes,
                               with.shared->workspace_size(joins ? problem : plan.shared, tokens));
      w.shared_bytes = round_up(w.shared_bytes, kAlignment);
      if (with.shared_wide) w.shared_dtype = DType::kF32;
      rows_bytes = tokens * plan.hidden_size * (dtype_bits(w.shared_dtype) / 8);
    }
  }
  if (plan.shared_stream) {
    w.experts = take<std::byte>(arena, w.experts_bytes);
    // A part that is wanted apart of a shared expert that joins: as large as the joined call's.
    w.shared =
        take<std::byte>(arena, std::max(w.shared_bytes, joins ? w.experts_bytes : 0) + rows_bytes);
  } else {
    w.experts = w.shared =
        take<std::byte>(arena, std::max(w.experts_bytes, w.shared_bytes + rows_bytes));
  }
  if (w.shared != nullptr) {
    w.shared_rows = w.shared + w.shared_bytes;
  }
  MOESAIC_RETURN_IF_ERROR(arena.status());
  return w;
}

}  // namespace moesaic::cuda
