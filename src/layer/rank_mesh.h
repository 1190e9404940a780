// The communication of a layer over ranks: its groups, what all ranks agree on before they start,
// and the collectives around the kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layer/rank_plan.h"
#include "moesaic/communicator.h"
#include "moesaic/modular_kernel.h"

namespace moesaic::layer {

// Whether `mine` is ok on all ranks and `value` (>= 0) the same. Otherwise every rank fails: with
// its own reason, or with kInvalidArgument that names a rank and its reason, or what `differs`.
//   names  of the ranks, where they are not those of `world`
Status agree(Communicator& world, std::string_view what, const Status& mine, std::int64_t value,
             std::string_view differs, std::span<const int> names = {});
// Whether all ranks have the same facts. Otherwise, and where a rank has a failure instead, as
// agree(), with the first fact that differs.
struct Fact {
  std::string_view name;
  std::string value;
};
Status agree_on(Communicator& world, std::string_view what, const Result<std::vector<Fact>>& facts);
// A value for agree().
std::int64_t fingerprint_of(std::string_view text);

class RankMesh {
 public:
  // The plan is active. Errors of Communicator::shared_subgroup.
  static Result<std::unique_ptr<RankMesh>> create(const FusedMoE::Options& options,
                                                  const RankPlan& plan);

  // How the rows of `problem` reach the experts of all ranks.
  Result<std::unique_ptr<PrepareAndFinalize>> make_prepare_finalize(
      const MoeProblem& problem, const ParallelConfig& parallel) const;

  // Steps of at most plan.batch_rows rows that all ranks take, and whether two of them at once. When
  // this rank has `rows` and its arguments are `mine`. Fails on all ranks as agree(), also when
  // replicas differ in rows, or in whether they take the shared experts `apart`, which is a
  // collective more.
  struct Steps {
    std::int64_t count = 0;
    bool in_pairs = false;
  };
  Result<Steps> common_steps(const Status& mine, std::int64_t rows, std::int64_t dual_batch_tokens,
                             bool apart) const;

  // values[i] = sum over the replicas, in rank order.
  Status reduce_replicas(std::span<float> values) const;
  // Every replica has written its share of the rows of `output` (contiguous); fills in the others'.
  Status gather_replicas(const TensorView& output) const;

  // Returns `status`. A failure, which this rank alone has seen between two collectives, abandons
  // the world first, so that the other ranks return it too instead of waiting.
  Status give_up(const Status& status) const;

  const std::shared_ptr<Communicator>& world() const { return world_; }
  // Ranks with other rows than this one's, and ranks with the same.
  const std::shared_ptr<Communicator>& tokens() const { return tokens_; }
  const std::shared_ptr<Communicator>& replicas() const { return replicas_; }
  std::span<const int> replica_ranks() const { return replica_ranks_; }  // their ranks in the world
  std::int64_t bytes_sent() const;

 private:
  RankMesh() = default;
  RankPlan plan_;
  std::shared_ptr<Communicator> world_;
  // Ranks with other rows, and ranks with the same.
  std::shared_ptr<Communicator> tokens_, replicas_;
  std::vector<int> replica_ranks_;
  int engine_tp_ = 1;
  bool sequence_parallel_ = false;
};

}  // namespace moesaic::layer
