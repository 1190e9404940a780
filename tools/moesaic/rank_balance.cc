#include "rank_balance.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "moesaic/eplb.h"

namespace moesaic::tool {

Result<RankBalance> balance_on_ranks(const RankContext& c, FusedMoE& layer, const Tensor& x,
                                     LayerOutput& result) {
  RankBalance b;
  b.same_bits = c.layer.ranks.reduction_in_force() == RankReduction::kPerSlot;
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<double> load, layer.measured_load());
  MOESAIC_ASSIGN_OR_RETURN(b.loads_before, rank_loads(load, layer.physical_to_logical(), c.size));
  const Tensor& now = result.output;
  const std::vector<std::byte> before(now.data(), now.data() + now.bytes());
  MOESAIC_RETURN_IF_ERROR(layer.begin_rebalance());
  for (bool done = false; !done;) {
    MOESAIC_ASSIGN_OR_RETURN(done, layer.continue_rearrange(/*max_transfers=*/2));
    MOESAIC_RETURN_IF_ERROR(forward(layer, x, result));
    ++b.calls;
    if (b.same_bits && std::memcmp(before.data(), now.data(), before.size()) != 0) {
      return Status(StatusCode::kInternal, "--eplb: the output changed while experts moved");
    }
  }
  b.physical_to_logical = layer.physical_to_logical();
  MOESAIC_ASSIGN_OR_RETURN(b.loads_after, rank_loads(load, b.physical_to_logical, c.size));
  b.balancedness_before = balancedness(b.loads_before, c.size);
  b.balancedness_after = balancedness(b.loads_after, c.size);
  return b;
}

Json to_json(const RankBalance& b) {
  return {{"physical_to_logical", b.physical_to_logical},
          {"rank_loads_before", b.loads_before},
          {"rank_loads_after", b.loads_after},
          {"balancedness_before", b.balancedness_before},
          {"balancedness_after", b.balancedness_after},
          {"calls_while_moving", b.calls},
          {"same_bits", b.same_bits}};
}

void print(const RankBalance& b, const Console& console) {
  console.print(fmt::format(
      "eplb     balancedness {:.3f} before, {:.3f} after; {} call(s) served on the way, {}\n"
      "slots    {}\n",
      b.balancedness_before, b.balancedness_after, b.calls,
      b.same_bits ? "not a bit of the output changed" : "sums in another order (per_rank)",
      fmt::join(b.physical_to_logical, " ")));
}

}  // namespace moesaic::tool
