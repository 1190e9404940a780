#include "permute/sm90/align_plan.h"

#include <algorithm>

#include "permute/sm90/align.h"

namespace moesaic::cuda {

AlignGrid plan_align(std::int32_t pairs, std::int64_t groups, const DeviceTraits& device) {
  const bool clusters = pairs > kOneBlockPairs;
  AlignGrid g;
  g.blocks = clusters ? kAlignClusterBlocks : 1;
  g.steps = (pairs - 1) / (g.blocks * kAlignThreads) + 1;
  g.shares = clusters ? std::max(1, 4 / g.steps) : 1;
  g.parts = clusters ? std::min(g.steps, kAlignHeld) * g.shares : 1;
  // One block a multiprocessor: in clusters, as many as find room at once; else all but the one
  // that places. A part with room for the placing clusters alone has them quantise everything.
  const std::int64_t most = clusters
                                ? std::max(device.clusters_of_8 - g.parts, 0) * kAlignClusterBlocks
                                : std::max(device.sms - 1, 1);
  const std::int64_t wanted = std::min((groups + kAlignBlockGroups - 1) / kAlignBlockGroups, most);
  g.quantizing = static_cast<std::int32_t>((wanted + g.blocks - 1) / g.blocks * g.blocks);
  // While the list is made, which takes 6 to 11 us, each of those that quantise gets through about
  // 85 groups a us.
  const std::int64_t meanwhile =
      std::int64_t{g.quantizing} * kAlignBlockGroups * (6 + std::min(g.steps, kAlignHeld));
  g.alone = static_cast<std::uint32_t>(clusters ? std::min(groups, meanwhile) : groups);
  return g;
}

}  // namespace moesaic::cuda
