// Worlds of two to eight ranks, a layer that is spread over them and what is done with it, all drawn
// from one seed. On GPUs, which ranks take in turn, functions of the caller's are left out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/fused_moe.h"

namespace moesaic::test {

// How ranks are laid out.
struct RandomWorld {
  int tp = 1, pcp = 1, dp = 1;
  bool ep = true, sp = false;
  ExpertPlacement placement = ExpertPlacement::kLinear;

  int ranks() const { return tp * pcp * dp; }
  bool rows_differ() const { return pcp * dp > 1 || sp; }
  int replicas() const { return sp ? 1 : tp; }
  // Ranks that have the same rows have one set of them.
  int sets() const { return ranks() / replicas(); }
  int set_of(int rank) const { return rank / replicas(); }
  ParallelConfig parallel(int rank) const {
    ParallelSizes sizes;
    sizes.tp_size = tp;
    sizes.tp_rank = rank % tp;
    sizes.pcp_size = pcp;
    sizes.pcp_rank = rank / tp % pcp;
    sizes.dp_size = dp;
    sizes.dp_rank = rank / tp / pcp;
    sizes.enable_expert_parallel = ep;
    sizes.sequence_parallel = sp;
    ParallelConfig config = ParallelConfig::from_sizes(sizes).value();
    config.placement = placement;
    return config;
  }
};

// A call's arguments for the ranks that have these rows, and what one rank makes of them.
struct RankRows {
  Tensor memory;  // of hidden states, whose rows may lie apart
  ConstTensorView x;
  Tensor logits, weights, ids, input_ids, padding;
  DType output = DType::kF32;
  bool apart = false;  // shared experts in an output of their own
  Tensor want, want_shared;

  FusedMoE::Args args(TensorView to, TensorView shared) const {
    FusedMoE::Args a;
    a.hidden_states = x;
    a.router_logits = logits.view();
    a.topk_weights = weights.view();
    a.topk_ids = ids.view();
    a.input_ids = input_ids.view();
    a.padding_mask = padding.view();
    a.output = to;
    if (apart) a.shared_output = shared;
    return a;
  }
};

enum class RankRefusal { kNone, kWidth, kDType, kNoMemory, kIds, kPadding, kRows };

struct RankCall {
  std::vector<RankRows> sets;
  std::vector<double> load;  // rows of all sets that chose each expert
  int refuser = 0;           // rank that passes what it must not
  RankRefusal refusal = RankRefusal::kNone;
};

// Calls in one world, and what is done between them.
struct RankEra {
  RandomWorld world;
  std::vector<RankCall> calls;
};

struct RandomRanks {
  std::uint64_t seed = 0;
  LayerTensors tensors;
  std::string scheme;
  std::vector<Device> devices;
  FusedMoE::Options options;  // what all ranks have in common
  std::vector<RankEra> eras;  // all of as many ranks
  double tolerance = 0;       // of F32 sums; 0: the bits of one rank
  int failing = -1;           // rank on which a function of the caller's fails in the end

  Device device_of(int rank) const {
    return devices[static_cast<std::size_t>(rank) % devices.size()];
  }
  std::string describe() const;
};

// Absent where one rank refuses the layer.
std::optional<RandomRanks> draw_ranks(std::uint64_t seed, std::vector<Device> devices);

}  // namespace moesaic::test
