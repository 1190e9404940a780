#include "layer/rank_mesh.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/guarded.h"
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
  mesh->replica_ranks_ = p.replica_group();
  MOESAIC_ASSIGN_OR_RETURN(mesh->replicas_,
                           group_of(mesh->world_, mesh->replica_ranks_, kReplicaGroup));
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

namespace {

// What a rank says before all do something together: a value, or (kRefused) why it does not take part.
struct Vote {
  std::int64_t value = 0;
  std::string refusal;
};
constexpr std::size_t kMostText = 4000;  // of a reason or of facts; no more of it is sent

// `text` of every rank; of those that send none, the rest of the room stays as it is.
Result<std::vector<std::string>> tell_all(Communicator& world, std::string_view what,
                                          std::string_view text) {
  try {
    const auto n = static_cast<std::size_t>(world.size());
    const std::vector<std::span<const std::byte>> send(
        n, std::as_bytes(std::span(text.data(), std::min(text.size(), kMostText))));
    std::vector<std::string> all(n, std::string(kMostText, ' '));
    std::vector<std::span<std::byte>> receive;
    receive.reserve(n);
    for (std::string& t : all) {
      receive.push_back(std::as_writable_bytes(std::span(t.data(), t.size())));
    }
    std::vector<std::int64_t> lengths(n, 0);
    MOESAIC_RETURN_IF_ERROR(world.control().exchange(what, send, receive, lengths));
    for (std::size_t r = 0; r < n; ++r) all[r].resize(static_cast<std::size_t>(lengths[r]));
    return all;
  } catch (const std::bad_alloc&) {
    return world.abandon("out of memory");
  }
}

// Every rank's vote, of one message each; a second one where some rank refuses.
Result<std::vector<Vote>> vote(Communicator& world, std::string_view what, const Status& mine,
                               std::int64_t value) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::int64_t> values,
                           world.control().all_gather(what, mine.ok() ? value : kRefused));
  try {
    std::vector<Vote> votes;
    votes.reserve(values.size());
    for (const std::int64_t v : values) votes.push_back({v, {}});
    if (std::find(values.begin(), values.end(), kRefused) == values.end()) return votes;
    const std::string why = mine.ok() ? std::string() : mine.to_string();
    MOESAIC_ASSIGN_OR_RETURN(std::vector<std::string> reasons, tell_all(world, "refusal", why));
    for (std::size_t r = 0; r < votes.size(); ++r) votes[r].refusal = std::move(reasons[r]);
    return votes;
  } catch (const std::bad_alloc&) {
    return world.abandon("out of memory");
  }
}

Status refused(std::string_view what, int rank, const Vote& vote) {
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: rank {} refused: {}", what, rank, vote.refusal)};
}

// The first line of `mine` that `theirs` has otherwise: "name is 'X' there, 'Y' here".
std::string first_difference(std::string_view theirs, std::string_view mine) {
  while (!mine.empty()) {
    const std::string_view here = mine.substr(0, mine.find('\n'));
    const std::string_view there = theirs.substr(0, theirs.find('\n'));
    if (here != there) {
      const std::size_t name = std::min(here.find('='), here.size());
      const bool same_name = there.substr(0, name) == here.substr(0, name);
      return fmt::format("{} is '{}' there, '{}' here", here.substr(0, name),
                         same_name ? there.substr(std::min(name + 1, there.size())) : there,
                         here.substr(std::min(name + 1, here.size())));
    }
    mine.remove_prefix(std::min(here.size() + 1, mine.size()));
    theirs.remove_prefix(std::min(there.size() + 1, theirs.size()));
  }
  return "something";
}

}  // namespace

Status agree(Communicator& world, std::string_view what, const Status& mine, std::int64_t value,
             std::string_view differs, std::span<const int> names) {
  const Result<std::vector<Vote>> all = vote(world, what, mine, value);
  MOESAIC_RETURN_IF_ERROR(mine);
  if (!all.ok()) return all.status();
  const auto name = [&](std::size_t r) { return names.empty() ? static_cast<int>(r) : names[r]; };
  for (std::size_t r = 0; r < all->size(); ++r) {
    const Vote& theirs = (*all)[r];
    if (theirs.value == kRefused) return refused(what, name(r), theirs);
    if (theirs.value != value) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: rank {} has {} than rank {}", what, name(r), differs,
                          name(static_cast<std::size_t>(world.rank())))};
    }
  }
  return {};
}

Status agree_on(Communicator& world, std::string_view what,
                const Result<std::vector<Fact>>& facts) {
  std::string text;
  const Status mine = without_exceptions(what, [&] {
    if (!facts.ok()) return facts.status();
    for (const Fact& f : *facts) text += fmt::format("{}={}\n", f.name, f.value);
    return Status();
  });
  const std::int64_t value = fingerprint_of(text);
  const Result<std::vector<Vote>> all = vote(world, what, mine, value);
  MOESAIC_RETURN_IF_ERROR(mine);
  if (!all.ok()) return all.status();
  bool same = true;
  for (std::size_t r = 0; r < all->size(); ++r) {
    const Vote& theirs = (*all)[r];
    if (theirs.value == kRefused) return refused(what, static_cast<int>(r), theirs);
    same = same && theirs.value == all->front().value;
  }
  if (same) return {};
  // All ranks come here, or none.
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::string> texts, tell_all(world, "facts", text));
  std::size_t other = 0;
  while (other + 1 < all->size() && (*all)[other].value == value) ++other;
  return {StatusCode::kInvalidArgument,
          fmt::format("{}: rank {} has other options or another layer than rank {}: {}", what,
                      other, world.rank(), first_difference(texts[other], text))};
}

std::int64_t fingerprint_of(std::string_view text) {
  return static_cast<std::int64_t>(fnv1a(text) >> 1);
}

Result<RankMesh::Steps> RankMesh::common_steps(const Status& mine, std::int64_t rows,
                                               std::int64_t dual_batch_tokens, bool apart) const {
  MOESAIC_RETURN_IF_ERROR(world_->state());
  const Result<std::vector<Vote>> all = vote(*world_, "forward", mine, rows * 2 + (apart ? 1 : 0));
  MOESAIC_RETURN_IF_ERROR(mine);
  if (!all.ok()) return all.status();
  std::int64_t most = 0;
  for (std::size_t r = 0; r < all->size(); ++r) {
    const Vote& theirs = (*all)[r];
    if (theirs.value == kRefused) return refused("forward", static_cast<int>(r), theirs);
    most = std::max(most, theirs.value / 2);
    // Without sequence parallelism the ranks of an engine's tensor-parallel group are neighbours
    // and have the same rows.
    const std::size_t first = r - r % static_cast<std::size_t>(engine_tp_);
    const std::int64_t same = (*all)[first].value;
    if (!sequence_parallel_ && theirs.value / 2 != same / 2) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("hidden_states: rank {} has {} rows, rank {} has {}; the ranks of a "
                      "tensor-parallel group need the same rows",
                      r, theirs.value / 2, first, same / 2));
    }
    if (!sequence_parallel_ && theirs.value != same) {
      return Status(
          StatusCode::kInvalidArgument,
          fmt::format("shared_output: rank {} gave {}, rank {} {}; the ranks of a tensor-parallel "
                      "group need one each, or none",
                      r, theirs.value % 2 == 1 ? "one" : "none", first,
                      same % 2 == 1 ? "one" : "none"));
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
