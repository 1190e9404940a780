#include "layer/rank_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "layer/engine.h"
#include "moesaic/communicator.h"

namespace moesaic {
namespace {

Result<RankTransport> resolve(RankTransport wanted, const ParallelConfig& p) {
  const bool rows_differ = p.token_group().size() > 1;
  if (wanted == RankTransport::kAuto) {
    if (!rows_differ) return RankTransport::kNone;
    return p.ep_size > 1 ? RankTransport::kAllToAll : RankTransport::kGather;
  }
  if (wanted == RankTransport::kNone && rows_differ) {
    return unsupported(
        fmt::format("transport: got none, but the rows of {} ranks differ (dp {}, pcp {}, sp {}); "
                    "need gather or all_to_all",
                    p.token_group().size(), p.dp_size, p.pcp_size, p.sp_size));
  }
  const bool to_owners = wanted == RankTransport::kAllToAll || wanted == RankTransport::kBatched;
  if (to_owners && p.ep_size == 1) {
    return unsupported(
        fmt::format("transport: got {}, but every rank has a slice of every expert (tp_size {}); "
                    "need expert parallelism, or gather",
                    rank_transport_name(wanted), p.tp_size));
  }
  return wanted;
}

// What a cast may have made of an engine's own numbers.
Status check_enumerators(const RankOptions& o) {
  const auto outside = [](std::string_view field, auto value, std::string_view type) {
    return invalid(fmt::format("{}: got {}, need one of {}", field, static_cast<int>(value), type));
  };
  if (o.transport > RankTransport::kBatched) {
    return outside("transport", o.transport, "RankTransport");
  }
  if (o.reduction_in_force() > RankReduction::kPerSlot) {
    return outside("reduction", o.reduction_in_force(), "RankReduction");
  }
  if (o.engine > RankEngine::kAuto) return outside("rank_engine", o.engine, "RankEngine");
  if (o.peer_memory > PeerMemory::kNccl) {
    return outside("peer_memory", o.peer_memory, "PeerMemory");
  }
  return {};
}

}  // namespace

std::string_view rank_transport_name(RankTransport transport) {
  switch (transport) {
    case RankTransport::kAuto:
      return "auto";
    case RankTransport::kNone:
      return "none";
    case RankTransport::kGather:
      return "gather";
    case RankTransport::kAllToAll:
      return "all_to_all";
    case RankTransport::kBatched:
      return "batched";
  }
  return "unknown";
}

std::string_view rank_reduction_name(RankReduction reduction) {
  return reduction == RankReduction::kPerSlot ? "per_slot" : "per_rank";
}

std::string_view rank_engine_name(RankEngine engine) {
  switch (engine) {
    case RankEngine::kMessages:
      return "messages";
    case RankEngine::kPeerWindows:
      return "peer_windows";
    case RankEngine::kAuto:
      return "auto";
  }
  return "unknown";
}

}  // namespace moesaic

namespace moesaic::layer {

Status peer_windows_fit(const RankPlan& plan, Device device) {
  constexpr int kMostRanks = 32;  // parallel::kPeerWindowRanks
  if (!device.is_cuda()) {
    return unsupported(
        fmt::format("rank_engine: got peer_windows on {}, need a GPU", device.to_string()));
  }
  if (plan.engine == RankEngine::kMessages) {
    return unsupported("rank_engine: got messages, need peer_windows or auto");
  }
  if (plan.transport != RankTransport::kGather && plan.transport != RankTransport::kAllToAll) {
    return unsupported(
        fmt::format("rank_engine: got peer_windows with transport {}, need gather or all_to_all",
                    rank_transport_name(plan.transport)));
  }
  if (plan.replicas > 1) {
    return unsupported(
        fmt::format("rank_engine: got peer_windows where {} ranks have the same rows, whose parts "
                    "are messages; need rows of its own on each rank",
                    plan.replicas));
  }
  if (plan.size > kMostRanks) {
    return unsupported(fmt::format("rank_engine: got peer_windows over {} ranks, need at most {}",
                                   plan.size, kMostRanks));
  }
  return {};
}

RowRange replica_share(std::int64_t rows, int replicas, int replica) {
  const std::int64_t each = ceil_div(rows, replicas);
  const std::int64_t first = std::min(each * replica, rows);
  return {first, std::min(each, rows - first)};
}

Result<RankPlan> plan_ranks(const FusedMoE::Options& options, std::int64_t top_k) {
  const ParallelConfig& p = options.parallel;
  RankPlan plan;
  plan.kernel_rows = plan.experts_rows = plan.batch_rows = options.max_tokens;
  const std::int64_t dual = options.ranks.dual_batch_tokens;
  if (dual < 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("dual_batch_tokens: got {}, need >= 0", dual));
  }
  if (options.ranks.pair_capacity < 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("pair_capacity: got {}, need >= 0", options.ranks.pair_capacity));
  }
  if (options.ranks.enable_eplb && (p.tp_size > 1 || p.placement != ExpertPlacement::kLinear)) {
    return unsupported("enable_eplb: got true, need expert parallelism with linear placement");
  }
  if (options.ranks.num_redundant_experts != 0 && !options.ranks.enable_eplb) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("num_redundant_experts: got {} without enable_eplb, need 0",
                              options.ranks.num_redundant_experts));
  }
  if (options.ranks.reduction == RankReduction::kPerSlot && p.tp_size > 1) {
    return unsupported(
        fmt::format("reduction: got per_slot with tp_size {}, whose ranks hold slices of experts; "
                    "need per_rank, or expert parallelism",
                    p.tp_size));
  }
  if (!options.ranks.communicator) return plan;
  plan.size = options.ranks.communicator->size();
  if (plan.size != p.flat_size() || options.ranks.communicator->rank() != p.flat_rank()) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("communicator: got rank {} of {}, parallel says rank {} of {}",
                    options.ranks.communicator->rank(), plan.size, p.flat_rank(), p.flat_size()));
  }
  if (plan.size == 1) return plan;
  MOESAIC_RETURN_IF_ERROR(check_enumerators(options.ranks));
  plan.active = true;
  plan.parallel = p;
  MOESAIC_ASSIGN_OR_RETURN(plan.transport, resolve(options.ranks.transport, p));
  const bool slots = options.ranks.reduction_in_force() == RankReduction::kPerSlot;
  plan.per_slot = slots && top_k > 1 && plan.transport != RankTransport::kBatched;
  plan.slots_as_rows = plan.per_slot && engine_of(options.device).slots_as_rows;
  plan.combine_dtype = options.ranks.combine_dtype;
  if (plan.combine_dtype != DType::kF32 && plan.combine_dtype != DType::kBF16) {
    return Status(StatusCode::kInvalidDType, fmt::format("combine_dtype: got {}, need F32 or BF16",
                                                         dtype_name(plan.combine_dtype)));
  }
  if (plan.combine_dtype != DType::kF32 && (slots || plan.transport == RankTransport::kNone ||
                                            plan.transport == RankTransport::kBatched)) {
    return unsupported(fmt::format(
        "combine_dtype: got {} with transport {} and reduction {}, need F32: only partial sums "
        "that travel (gather, all_to_all, per_rank) are rounded",
        dtype_name(plan.combine_dtype), rank_transport_name(plan.transport),
        rank_reduction_name(slots ? RankReduction::kPerSlot : RankReduction::kPerRank)));
  }
  if (dual > 0) {
    if (plan.transport == RankTransport::kNone) {
      return unsupported(fmt::format(
          "dual_batch_tokens: got {} with transport none, where no rows travel; need 0", dual));
    }
    MOESAIC_RETURN_IF_ERROR(expect_cpu(options.device).with_context("dual_batch_tokens"));
    plan.in_flight = 2;
    plan.batch_rows = ceil_div(options.max_tokens, 2);
  }
  plan.pair_capacity = options.ranks.pair_capacity;
  const std::vector<int> replicas = p.replica_group();
  plan.replicas = static_cast<int>(replicas.size());
  plan.replica = static_cast<int>(std::find(replicas.begin(), replicas.end(), p.flat_rank()) -
                                  replicas.begin());

  plan.engine = options.ranks.engine;
  if (plan.engine == RankEngine::kPeerWindows) {
    MOESAIC_RETURN_IF_ERROR(peer_windows_fit(plan, options.device));
  }
  plan.peer_memory = options.ranks.peer_memory;
  if (plan.peer_memory != PeerMemory::kAuto) {
    MOESAIC_RETURN_IF_ERROR(
        peer_windows_fit(plan, options.device)
            .with_context(fmt::format("peer_memory: got {}", peer_memory_name(plan.peer_memory))));
  }
  if (plan.pair_capacity > 0) {
    MOESAIC_RETURN_IF_ERROR(
        peer_windows_fit(plan, options.device)
            .with_context(fmt::format("pair_capacity: got {}", plan.pair_capacity)));
  }

  plan.kernel_rows = plan.experts_rows = plan.batch_rows;
  // Ranks from which rows arrive at this rank's experts.
  std::int64_t senders = 1;
  switch (plan.transport) {
    case RankTransport::kGather:
      // Complete over the ranks whose rows differ; experts (or slices) of the replicas are missing.
      senders = static_cast<std::int64_t>(p.token_group().size());
      plan.reduced = plan.replicas == 1;
      break;
    case RankTransport::kAllToAll:
    case RankTransport::kBatched:
      senders = plan.size;
      plan.kernel_rows = ceil_div(plan.batch_rows, plan.replicas);
      break;
    case RankTransport::kAuto:
    case RankTransport::kNone:
      plan.reduced = false;
      break;
  }
  if (MOESAIC_FAULT(layer_ranks_never_reduce)) plan.reduced = true;
  // Slots and transforms need complete sums before the output is made.
  plan.leaves_sum = !options.ranks.reduce_results && !plan.reduced && !plan.per_slot &&
                    !options.transform.output && !options.on_device.routed_output;
  if (plan.slots_as_rows) plan.kernel_rows *= top_k;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (plan.kernel_rows > kMost / senders) {
    return Status(
        StatusCode::kLimitExceeded,
        fmt::format("max_tokens: got {}, the rows of {} ranks{} exceed 2^31-1", options.max_tokens,
                    senders, plan.slots_as_rows ? " and all slots" : ""));
  }
  plan.experts_rows = plan.kernel_rows * senders;
  return plan;
}

}  // namespace moesaic::layer
