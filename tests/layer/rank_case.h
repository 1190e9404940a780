// One layer on many ranks: every way to spread it, what one rank of it does, and the comparison
// with the same layer on one rank. Ranks may be threads or processes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "layer/layer_specs.h"
#include "moesaic/communicator.h"
#include "support/hang_guard.h"

namespace moesaic::test {

// A way to spread a layer over tp * pcp * dp ranks.
struct RankCombo {
  int tp = 1, pcp = 1, dp = 1;
  bool ep = false, sp = false;
  ExpertPlacement placement = ExpertPlacement::kLinear;
  RankTransport transport = RankTransport::kAuto;
  RankReduction reduction = RankReduction::kPerRank;
  bool dual = false;  // two batches of every call under way at once

  int ranks() const { return tp * pcp * dp; }
  // Whether rows travel to the experts, so that two batches may be.
  bool moves_rows() const {
    return transport == RankTransport::kAuto ? dp * pcp > 1 || sp
                                             : transport != RankTransport::kNone;
  }
  std::string name() const;
};
// All that are legal for so many ranks, with every transport, placement and reduction; pcp of 1 and
// of everything that divides what dp leaves.
std::vector<RankCombo> rank_combos(int ranks);

// DeepSeek-V3, Llama 4, biases with a scaled output, identity experts; all but the third with a
// shared expert.
std::vector<Feature> rank_specs();

// Makes a layer whose options have parallel, communicator, transport and reduction set.
using MakeRankLayer = std::function<Result<FusedMoE>(const FusedMoE::Options&)>;

// A layer, its rows, and what one rank makes of them.
struct RankProblem {
  MakeRankLayer make;
  FusedMoE::Options options;  // what all ranks have in common
  std::int64_t top_k = 1;
  Tensor x;             // [rows of all engines, H]
  Tensor want;          // [rows, H] F32, from one rank
  Tensor ids;           // [rows, k] I32
  double bound = 1e-6;  // relative L2 where the order of sums differs
  bool slices = true;   // tensor-parallel slices are possible
};
// Fills want and ids from a layer on one rank.
void solve_on_one_rank(RankProblem& problem);

// The part of one rank: builds its layer, gives it the rows of its engine (`tokens` per dp and pcp
// rank, sum = rows of x; sequence-parallel shares are padded), checks what comes back. Empty, or
// what is wrong.
std::string run_rank(const RankProblem& problem, const RankCombo& combo,
                     const std::vector<std::int64_t>& tokens,
                     const std::shared_ptr<Communicator>& communicator);
// All ranks as threads.
std::string run_ranks(const RankProblem& problem, const RankCombo& combo,
                      const std::vector<std::int64_t>& tokens);

// `total` tokens cut at random into `parts`, some of them empty.
std::vector<std::int64_t> uneven_tokens(std::uint64_t seed, std::int64_t total, int parts);

// What Checkpoint::load_layer would return for this rank: its experts, or its slice of each; shared
// experts whole, or cut among the ranks with the same rows.
MoeLayerWeights rank_weights(const LayerTensors& tensors, const ParallelConfig& parallel,
                             bool cut_shared = false);
MakeRankLayer maker_of(const LayerTensors& tensors);

// The first MoE layer of a checkpoint on `rows` rows of its golden file, solved on one rank. The
// checkpoint outlives the problem.
RankProblem checkpoint_problem(const Checkpoint& checkpoint, const std::string& folder,
                               const std::string& quant, std::int64_t rows);

// body(rank, communicator) on two threads; the statuses.
std::vector<Status> on_two_ranks(
    const std::function<Status(int, std::shared_ptr<Communicator>)>& body,
    int timeout_ms = kHangGuardMs);

}  // namespace moesaic::test
