#include "layer/rank_mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/hash.h"

namespace moesaic::layer {
namespace {

// Groups with a common member need different ids; the two groups of a rank meet in that rank.
constexpr int kTokenGroup = 1, kReplicaGroup = 2;

// A group of everybody is the world itself: no second connection.
Result<std::shared_ptr<Communicator>> group_of(const std::shared_ptr<Communicator>& world,
                                               const std::vector<int>& ranks, int id) {
  bool all = std::ssize(ranks) == world->size();
  for (std::size_t i = 0; i < ranks.size(); ++i) all = all && ranks[i] == static_cast<int>(i);
  if (all) return world;
  return world->shared_subgroup(ranks, id);
}

constexpr std::int64_t kRefused = -1;  // instead of a value: this rank does not take part

}  // namespace

Result<std::unique_ptr<RankMesh>> RankMesh::create(const FusedMoE::Options& options,
                                                   const RankPlan& plan) {
  std::unique_ptr<RankMesh> mesh(new (std::nothrow) RankMesh);
  if (!mesh) return Status(StatusCode::kOutOfMemory, "cannot allocate the groups of ranks");
  const ParallelConfig& p = options.parallel;
  mesh->plan_ = plan;
  mesh->world_ = options.ranks.communicator;
  mesh->engine_tp_ = p.engine_tp_size();
  mesh->sequence_parallel_ = p.is_sequence_parallel();
  MOESAIC_ASSIGN_OR_RETURN(mesh->tokens_, group_of(mesh->world_, p.token_group(), kTokenGroup));
  MOESAIC_ASSIGN_OR_RETURN(mesh->replicas_,
                           group_of(mesh->world_, p.replica_group(), kReplicaGroup));
  return mesh;
}

Result<std::unique_ptr<PrepareAndFinalize>> RankMesh::make_prepare_finalize(
    const MoeProblem& problem, const ParallelConfig& parallel) const {
  AllToAllOptions options;
  options.parallel = parallel;
  options.max_tokens_per_rank = plan_.kernel_rows;
  options.combine_dtype = plan_.combine_dtype;
  switch (plan_.transport) {
    case RankTransport::kGather:
      options.gather = true;
      return make_all_to_all_prepare_finalize(problem, tokens_, options);
    case RankTransport::kAllToAll:
      return make_all_to_all_prepare_finalize(problem, world_, options);
    case RankTransport::kBatched:
      return make_batched_all_to_all_prepare_finalize(problem, world_, options);
    case RankTransport::kAuto:
    case RankTransport::kNone:
      break;
  }
  return make_local_prepare_finalize(problem);
}

Status agree(Communicator& world, std::string_view what, const Status& mine, std::int64_t value,
             std::string_view differs) {
  const auto all = world.control().all_gather(what, mine.ok() ? value : kRefused);
  MOESAIC_RETURN_IF_ERROR(mine);
  if (!all.ok()) return all.status();
  for (std::size_t r = 0; r < all->size(); ++r) {
    const std::int64_t theirs = (*all)[r];
    if (theirs == kRefused) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: rank {} refused, its own message says why", what, r)};
    }
    if (theirs != value) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: rank {} has {} than rank {}", what, r, differs, world.rank())};
    }
  }
  return {};
}

std::int64_t fingerprint_of(std::string_view text) {
  return static_cast<std::int64_t>(fnv1a(text) >> 1);
}

Result<RankMesh::Steps> RankMesh::common_steps(const Status& mine, std::int64_t rows,
                                               std::int64_t dual_batch_tokens, bool apart) const {
  MOESAIC_RETURN_IF_ERROR(world_->state());
  MOESAIC_ASSIGN_OR_RETURN(
      const std::vector<std::int64_t> all,
      world_->control().all_gather("forward", mine.ok() ? rows * 2 + (apart ? 1 : 0) : kRefused));
  MOESAIC_RETURN_IF_ERROR(mine);
  std::int64_t most = 0;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] == kRefused) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("forward: rank {} refused its arguments, its own message says why", r));
    }
    most = std::max(most, all[r] / 2);
    // Without sequence parallelism the ranks of an engine's tensor-parallel group are neighbours
    // and have the same rows.
    const std::size_t first = r - r % static_cast<std::size_t>(engine_tp_);
    if (!sequence_parallel_ && all[r] / 2 != all[first] / 2) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("hidden_states: rank {} has {} rows, rank {} has {}; the ranks of a "
                      "tensor-parallel group need the same rows",
                      r, all[r] / 2, first, all[first] / 2));
    }
    if (!sequence_parallel_ && all[r] != all[first]) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("shared_output: rank {} gave {}, rank {} {}; the ranks of a tensor-parallel "
                      "group need one each, or none",
                      r, all[r] % 2 == 1 ? "one" : "none", first,
                      all[first] % 2 == 1 ? "one" : "none"));
    }
  }
  Steps steps{ceil_div(most, plan_.batch_rows)};
  // The call of the rank with the most rows decides for all.
  steps.in_pairs = plan_.in_flight == 2 && most >= dual_batch_tokens;
  if (steps.in_pairs && most > 1) steps.count = std::max<std::int64_t>(steps.count, 2);
  return steps;
}

Status RankMesh::reduce_replicas(std::span<float> values) const {
  return replicas_->all_reduce_sum("reduce", values);
}

Status RankMesh::gather_replicas(const TensorView& output) const {
  const std::int64_t rows = output.dim(0);
  const std::int64_t row_bytes = output.dim(1) * dtype_bits(output.dtype) / 8;
  const auto bytes_of = [&](int replica) {
    const RowRange r = replica_share(rows, plan_.replicas, replica);
    return std::span<std::byte>(output.data + r.first * row_bytes,
                                static_cast<std::size_t>(r.count * row_bytes));
  };
  const std::span<std::byte> mine = bytes_of(plan_.replica);
  try {
    // The own part would be copied onto itself: receive it elsewhere.
    std::vector<std::byte> own(mine.size());
    const std::vector<std::span<const std::byte>> send(static_cast<std::size_t>(plan_.replicas),
                                                       mine);
    std::vector<std::span<std::byte>> receive;
    receive.reserve(send.size());
    for (int r = 0; r < plan_.replicas; ++r) {
      receive.push_back(r == plan_.replica ? std::span<std::byte>(own) : bytes_of(r));
    }
    return replicas_->exchange("gather", send, receive);
  } catch (const std::bad_alloc&) {
    return give_up({StatusCode::kOutOfMemory, "gather: cannot allocate a buffer"});
  }
}

Status RankMesh::give_up(const Status& status) const {
  if (!status.ok()) {
    static_cast<void>(
        world_->abandon(fmt::format("rank {}: {}", world_->rank(), status.message())));
  }
  return status;
}

std::int64_t RankMesh::bytes_sent() const {
  std::int64_t bytes = world_->bytes_sent();
  for (const auto& group : {tokens_, replicas_}) {
    if (group != world_) bytes += group->bytes_sent();
  }
  return bytes;
}

}  // namespace moesaic::layer
