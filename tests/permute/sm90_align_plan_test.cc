// The grid of launch_align for a device: host code, so without one.
#include <gtest/gtest.h>

#include <tuple>

#include "permute/sm90/align_plan.h"

namespace moesaic::cuda {
namespace {

using Placing = std::tuple<int, int, int, int>;
using Quantizing = std::pair<int, unsigned>;

Placing placing(std::int32_t pairs, const DeviceTraits& device = {}) {
  const AlignGrid g = plan_align(pairs, 0, device);
  return {g.blocks, g.parts, g.steps, g.shares};
}
Quantizing quantizing(std::int32_t pairs, std::int64_t groups, const DeviceTraits& device = {}) {
  const AlignGrid g = plan_align(pairs, groups, device);
  return {g.quantizing, g.alone};
}

// 132 multiprocessors are measured, 114 those of an H100 PCIe.
const DeviceTraits kSxm = hopper_traits(132), kPcieAlign = hopper_traits(114);

TEST(AlignPlan, BlocksThatPlaceDependOnThePairsAlone) {
  for (const DeviceTraits& device : {DeviceTraits(), kSxm, kPcieAlign}) {
    EXPECT_EQ(placing(1, device), Placing(1, 1, 1, 1));
    EXPECT_EQ(placing(1024, device), Placing(1, 1, 1, 1));
    EXPECT_EQ(placing(1025, device), Placing(8, 4, 1, 4));
    EXPECT_EQ(placing(8193, device), Placing(8, 4, 2, 2));
    EXPECT_EQ(placing(24000, device), Placing(8, 3, 3, 1));
    EXPECT_EQ(placing(65536, device), Placing(8, 8, 8, 1));
    EXPECT_EQ(placing(300000, device), Placing(8, 8, 37, 1));
  }
}

TEST(AlignPlan, BlocksThatQuantiseFillTheDevice) {
  // No rows to quantise, or fewer groups than there are places for.
  EXPECT_EQ(quantizing(1024, 0), Quantizing(0, 0));
  EXPECT_EQ(quantizing(8192, 0), Quantizing(0, 0));
  EXPECT_EQ(quantizing(1024, 1000, kPcieAlign), Quantizing(16, 1000));
  EXPECT_EQ(quantizing(8192, 1000), Quantizing(16, 1000));
  // One block places, all other multiprocessors quantise.
  EXPECT_EQ(quantizing(1024, 57344), Quantizing(131, 57344));
  EXPECT_EQ(quantizing(1024, 57344, kSxm), Quantizing(131, 57344));
  EXPECT_EQ(quantizing(1024, 57344, kPcieAlign), Quantizing(113, 57344));
  // 15 clusters of eight blocks, or 12, of which four or eight place.
  EXPECT_EQ(quantizing(8192, 57344), Quantizing(88, 88 * 64 * 7));
  EXPECT_EQ(quantizing(8192, 57344, kPcieAlign), Quantizing(64, 64 * 64 * 7));
  EXPECT_EQ(quantizing(65536, 458752), Quantizing(56, 56 * 64 * 14));
  EXPECT_EQ(quantizing(65536, 458752, kPcieAlign), Quantizing(32, 32 * 64 * 14));
  EXPECT_EQ(quantizing(300000, 458752), Quantizing(56, 56 * 64 * 14));
}

TEST(AlignPlan, WithoutRoomTheBlocksThatPlaceQuantise) {
  const DeviceTraits sixteen = hopper_traits(16);  // as a part of a shared GPU has
  EXPECT_EQ(sixteen.clusters_at_once(8), 1);
  EXPECT_EQ(quantizing(8192, 57344, sixteen), Quantizing(0, 0));
  EXPECT_EQ(quantizing(8, 57344, sixteen), Quantizing(15, 57344));
  EXPECT_EQ(quantizing(8, 57344, hopper_traits(1)), Quantizing(1, 57344));
}

}  // namespace
}  // namespace moesaic::cuda
