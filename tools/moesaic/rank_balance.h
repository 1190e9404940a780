// --eplb of moesaic run: measures the load of the experts, moves them between the ranks, and shows
// that the output stays the same where sums keep their order.
#pragma once

#include <optional>
#include <vector>

#include "layer_io.h"
#include "rank_cli.h"

namespace moesaic::tool {

struct RankBalance {
  std::vector<std::int32_t> physical_to_logical;  // after
  std::vector<double> loads_before, loads_after;  // per rank
  double balancedness_before = 1, balancedness_after = 1;
  int calls = 0;          // forward calls that were served while experts moved
  bool same_bits = true;  // looked for, and true: not with per_rank sums, whose order changes
};

// All ranks together, after at least one forward call: experts move a few at a time towards the
// placement that the measured load asks for, with a forward call between two moves; `result` is
// computed anew on `x` in each. kInternal when a bit of the output changes that must not.
Result<RankBalance> balance_on_ranks(const RankContext& context, FusedMoE& layer, const Tensor& x,
                                     LayerOutput& result);

Json to_json(const RankBalance& balance);
void print(const RankBalance& balance, const Console& console);

}  // namespace moesaic::tool
