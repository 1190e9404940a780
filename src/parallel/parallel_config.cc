// ParallelConfig: flattening of tp, pcp and dp into what the MoE layer sees, and its validation.
#include <fmt/format.h>

#include <limits>

#include "core/checked.h"
#include "core/fault.h"
#include "moesaic/parallel.h"

namespace moesaic {
namespace {

Status check_axis(const char* axis, int size, int rank) {
  if (size < 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}_size: got {}, need a number >= 1", axis, size));
  }
  if (rank < 0 || rank >= size) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("{}_rank: got {}, need 0 <= rank < {}_size = {}", axis, rank, axis, size));
  }
  return {};
}

}  // namespace

std::string_view expert_placement_name(ExpertPlacement placement) {
  switch (placement) {
    case ExpertPlacement::kLinear:
      return "linear";
    case ExpertPlacement::kRoundRobin:
      return "round_robin";
  }
  return "unknown";
}

Result<ParallelConfig> ParallelConfig::from_sizes(const ParallelSizes& sizes) {
  MOESAIC_RETURN_IF_ERROR(check_axis("tp", sizes.tp_size, sizes.tp_rank));
  MOESAIC_RETURN_IF_ERROR(check_axis("pcp", sizes.pcp_size, sizes.pcp_rank));
  MOESAIC_RETURN_IF_ERROR(check_axis("dp", sizes.dp_size, sizes.dp_rank));
  // Each size is below 2^31, so the product of two fits 63 bits and only the third can overflow.
  const auto flat_size =
      checked_mul(std::int64_t{sizes.dp_size} * sizes.pcp_size, std::int64_t{sizes.tp_size});
  if (!flat_size || *flat_size > std::numeric_limits<int>::max()) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("flat_size: dp_size {} * pcp_size {} * tp_size {} exceeds 2^31-1",
                              sizes.dp_size, sizes.pcp_size, sizes.tp_size));
  }
  // Tensor parallelism varies fastest: neighbours in a tp group have neighbouring flat ranks.
  std::int64_t flat_rank =
      (std::int64_t{sizes.dp_rank} * sizes.pcp_size + sizes.pcp_rank) * sizes.tp_size +
      sizes.tp_rank;
  if (MOESAIC_FAULT(parallel_flat_rank_order)) {
    flat_rank = (std::int64_t{sizes.tp_rank} * sizes.pcp_size + sizes.pcp_rank) * sizes.dp_size +
                sizes.dp_rank;
  }

  ParallelConfig config;
  const bool use_ep = *flat_size > 1 && sizes.enable_expert_parallel;
  (use_ep ? config.ep_size : config.tp_size) = static_cast<int>(*flat_size);
  (use_ep ? config.ep_rank : config.tp_rank) = static_cast<int>(flat_rank);
  config.dp_size = sizes.dp_size;
  config.dp_rank = sizes.dp_rank;
  config.pcp_size = sizes.pcp_size;
  config.sp_size = sizes.sequence_parallel ? sizes.tp_size : 1;
  return config;
}

std::vector<int> ParallelConfig::token_group() const {
  const int tp = engine_tp_size();
  std::vector<int> ranks;
  if (is_sequence_parallel()) {
    for (int r = 0; r < flat_size(); ++r) ranks.push_back(r);
    return ranks;
  }
  const int mine = MOESAIC_FAULT(parallel_token_group_of_rank_zero) ? 0 : flat_rank() % tp;
  for (int r = mine; r < flat_size(); r += tp) ranks.push_back(r);
  return ranks;
}

std::vector<int> ParallelConfig::replica_group() const {
  if (is_sequence_parallel()) return {flat_rank()};
  const int tp = engine_tp_size();
  std::vector<int> ranks;
  for (int r = flat_rank() / tp * tp; static_cast<int>(ranks.size()) < tp; ++r) ranks.push_back(r);
  return ranks;
}

Status ParallelConfig::validate() const {
  MOESAIC_RETURN_IF_ERROR(check_axis("tp", tp_size, tp_rank));
  MOESAIC_RETURN_IF_ERROR(check_axis("ep", ep_size, ep_rank));
  MOESAIC_RETURN_IF_ERROR(check_axis("dp", dp_size, dp_rank));
  if (tp_size > 1 && ep_size > 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("tp_size: got {} together with ep_size {}, need 1: with expert "
                              "parallelism each expert is whole on one rank",
                              tp_size, ep_size));
  }
  MOESAIC_RETURN_IF_ERROR(check_axis("pcp", pcp_size, 0));
  MOESAIC_RETURN_IF_ERROR(check_axis("sp", sp_size, 0));
  if (flat_size() % dp_size != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("dp_size: got {}, need a divisor of the flattened size {}", dp_size,
                              flat_size()));
  }
  if ((flat_size() / dp_size) % pcp_size != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("pcp_size: got {}, need a divisor of {} (flattened size {} / dp_size "
                              "{})",
                              pcp_size, flat_size() / dp_size, flat_size(), dp_size));
  }
  if (sp_size != 1 && sp_size != engine_tp_size()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("sp_size: got {}, need 1 or the engine's tp size {}", sp_size,
                              engine_tp_size()));
  }
  if (placement != ExpertPlacement::kLinear && placement != ExpertPlacement::kRoundRobin) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("placement: got {}, need linear (0) or round_robin (1)",
                              static_cast<int>(placement)));
  }
  return {};
}

}  // namespace moesaic
