// Layers with load balancing on four ranks that are threads, and their truth on one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layer/layer_case.h"
#include "moesaic/communicator.h"

namespace moesaic::test {

inline constexpr int kEplbRanks = 4;
inline constexpr std::int64_t kEplbTokens = 9;  // per engine

// E 12, k 5 (more than two: the order of the sum shows in the bits), grouped, a shared expert.
MoeLayerSpec eplb_spec();

// 12 experts in 16 slots on four ranks, a window of three calls.
FusedMoE::Options eplb_options(int rank, int dp, RankTransport transport,
                               const std::shared_ptr<Communicator>& communicator);

// Every expert somewhere, the rest at random.
std::vector<std::int32_t> random_map(std::uint64_t seed, std::int64_t experts, std::int64_t slots);

// body(rank, communicator) on so many threads; what each returns.
std::vector<std::string> on_ranks(
    const std::function<std::string(int, std::shared_ptr<Communicator>)>& body,
    int ranks = kEplbRanks);

struct EplbFixture {
  // `one`: the options of the layer on one rank.
  explicit EplbFixture(const MoeLayerSpec& spec, FusedMoE::Options one = {});
  // The rows of `engine`.
  ConstTensorView rows_of(int engine) const;
  // Empty, or how the rows of `engine` differ from those of a layer on one rank; `bound` above 0:
  // relative L2 instead of bits. `more`: whatever else the call brings. `got`: the output.
  std::string forward(const FusedMoE& layer, int engine, double bound = 0, FusedMoE::Args more = {},
                      Tensor* got = nullptr) const;

  LayerTensors tensors;
  Tensor x;
  LayerRun run;
};

// Six rearrangements, every other one by measured load, with calls on the rows of `engine` between all
// their steps. Empty, or the first thing wrong: an output further than `bound` from one rank's (0: in
// bits) or with other bits than the first one, maps in force too early or not those wanted.
std::string serve_while_experts_move(FusedMoE& layer, const EplbFixture& f, int engine,
                                     double bound = 0);

// Five calls on the rows of `engine`, of which all ranks' layers remember three: empty, or how the
// measured load is not three times how often the first `engines` engines chose each expert.
std::string measure_five_calls(const FusedMoE& layer, const EplbFixture& f, int engine, int engines,
                               double bound = 0);

// How often the rows of the engines [first, last) chose each expert, `times` times.
std::vector<double> choices(const EplbFixture& f, int first, int last, double times = 1);

}  // namespace moesaic::test
