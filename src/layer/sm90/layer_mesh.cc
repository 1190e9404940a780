// A CudaLayer among other ranks: how rows travel, what all agree on before a call, and failures.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "core/fault.h"
#include "layer/sm90/layer_impl.h"
#include "parallel/peer_window.h"
#include "prepare_finalize/sm90/all_to_all.h"
#include "prepare_finalize/sm90/catalogue_row.h"
#include "prepare_finalize/sm90/padded_rows.h"
#include "prepare_finalize/sm90/slabbed_rows.h"

namespace moesaic::cuda {

Status CudaLayer::Impl::create_transport(const FusedMoE::Options& options) {
  const layer::RankPlan& ranks = plan.ranks;
  AllToAllOptions o;
  o.parallel = options.parallel;
  o.max_tokens_per_rank = ranks.kernel_rows;
  o.gather = ranks.transport == RankTransport::kGather;
  if (ranks.transport == RankTransport::kBatched) {
    MOESAIC_ASSIGN_OR_RETURN(
        std::unique_ptr<SlabbedRows> made,
        SlabbedRows::create(plan.routed, mesh->world(), o, chosen.slot_dtype()));
    transport_bytes = made->bytes();
    transport = std::move(made);
    return {};
  }
  using Form = CudaAllToAll::Answer::Form;
  const CudaAllToAll::Answer answer =
      ranks.per_slot ? CudaAllToAll::Answer{Form::kSlots, chosen.slot_dtype()}
                     : CudaAllToAll::Answer{Form::kPartial, ranks.combine_dtype};
  const std::shared_ptr<Communicator>& between = o.gather ? mesh->tokens() : mesh->world();
  const MoeProblem carried = carried_problem(plan.routed);
  const bool padded = carried.hidden_size != plan.routed.hidden_size;
  const auto keep = [&](std::unique_ptr<PrepareAndFinalize> made) -> Status {
    transport = std::move(made);
    if (!padded) return {};
    MOESAIC_ASSIGN_OR_RETURN(
        std::unique_ptr<PaddedRows> around,
        PaddedRows::around(std::move(transport), plan.routed, o.max_tokens_per_rank,
                           ranks.per_slot ? plan.routed.top_k : 1));
    transport_bytes += around->bytes();
    transport = std::move(around);
    return {};
  };
  if (ranks.engine != RankEngine::kMessages) {
    Status fits = layer::peer_windows_fit(ranks, options.device);
    if (fits.ok()) {
      MOESAIC_ASSIGN_OR_RETURN(pair_capacity, pair_capacity_of(plan, chosen));
      Result<std::unique_ptr<CudaPeerAllToAll>> made = CudaPeerAllToAll::create(
          carried, between, o, answer, !padded && experts != nullptr && experts->has_slots_place(),
          ranks.peer_memory);
      if (made.ok()) {
        peers = made->get();
        if (balance != nullptr) balance->let_peers_write(ranks.peer_memory);
        transport_bytes = peers->bytes();
        return keep(std::move(*made));
      }
      fits = made.status();
    }
    // All ranks are refused, or none.
    const bool too_many = fits.code() == StatusCode::kLimitExceeded;  // rows for a window
    if (ranks.engine == RankEngine::kPeerWindows ||
        (fits.code() != StatusCode::kUnsupported && !too_many)) {
      return fits;
    }
    if (ranks.pair_capacity > 0) {
      return fits.with_context(fmt::format("pair_capacity: got {}", ranks.pair_capacity));
    }
    no_peers = fits.message();
  }
  MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<CudaAllToAll> made,
                           CudaAllToAll::create(carried, between, o, answer));
  transport_bytes = made->bytes();
  return keep(std::move(made));
}

Status CudaLayer::Impl::withdraw_from_ranks(const Status& reason) const {
  // The others make windows together; they learn of messages later, where all agree on the layer.
  if (layer::peer_windows_fit(plan.ranks, Device::cuda(device)).ok()) {
    const bool gather = plan.ranks.transport == RankTransport::kGather;
    static_cast<void>(parallel::make_peer_window(gather ? *mesh->tokens() : *mesh->world(), device,
                                                 0, reason, plan.ranks.peer_memory));
  }
  return reason;
}

Status CudaLayer::Impl::create_ranks(const FusedMoE::Options& options) {
  const layer::RankPlan& ranks = plan.ranks;
  if (ranks.transport != RankTransport::kNone) {
    MOESAIC_RETURN_IF_ERROR(create_transport(options));
  } else if (ranks.per_slot) {
    MOESAIC_RETURN_IF_ERROR(slot_rows.reserve(
        "slots",
        max_tokens * plan.routed.top_k * plan.latent_size * (dtype_bits(chosen.slot_dtype()) / 8)));
  }
  if (ranks.replicas == 1) return {};
  const std::int64_t summed =
      ranks.reduced ? 0
                    : std::max(max_tokens * std::max(plan.hidden_size, plan.latent_size) * 4,
                               slot_rows.bytes());
  MOESAIC_ASSIGN_OR_RETURN(replicas, DeviceReplicas::create(mesh->replicas(), device, summed));
  return {};
}

Result<std::int64_t> CudaLayer::Impl::start_call(void* stream, const Status& checked,
                                                 std::int64_t rows, bool parts) const {
  if (peers == nullptr) {
    const Status status = checked.ok() ? check_not_capturing(stream) : checked;
    MOESAIC_ASSIGN_OR_RETURN(const layer::RankMesh::Steps steps,
                             mesh->common_steps(status, status.ok() ? rows : 0,
                                                /*dual_batch_tokens=*/0, status.ok() && parts));
    return steps.count;
  }
  MOESAIC_RETURN_IF_ERROR(peers->health());
  MOESAIC_RETURN_IF_ERROR(mesh->world()->state());
  // Both are the default stream; what one rank puts there waits for the others' work.
  const bool is_default = stream == nullptr || stream == reinterpret_cast<void*>(1);
  if (checked.ok() && is_default && peers->shares_streams()) {
    return give_up(peers->stream(),
                   {StatusCode::kInvalidArgument,
                    "stream: got the default stream, which all ranks on a device share; need one "
                    "of this rank's own"});
  }
  if (!checked.ok()) return give_up(stream, checked);
  return std::int64_t{1};  // also without rows: others may have some
}

Status CudaLayer::Impl::give_up(void* stream, const Status& status) const {
  if (status.ok()) return status;
  if (peers != nullptr) {
    // A call that is only captured is none: nobody waits for it, and the next one may be in order.
    const bool captured = check_not_capturing(stream).code() == StatusCode::kUnsupported;
    if (captured && !MOESAIC_FAULT(cuda_refused_capture_ends_all_calls)) return status;
    if (!captured) peers->refuse(stream);
  }
  return mesh->give_up(status);
}

Status CudaLayer::health() const {
  return impl_->peers != nullptr ? impl_->peers->health() : Status();
}

std::string CudaLayer::rank_engine() const {
  if (impl_->peers != nullptr) {
    return fmt::format("through peer windows ({})", impl_->peers->memory());
  }
  return impl_->no_peers.empty() ? "" : fmt::format("by messages ({})", impl_->no_peers);
}

}  // namespace moesaic::cuda
