// Which gate kernels and grids are chosen for a device: host code, so without one.
#include <gtest/gtest.h>

#include <tuple>

#include "gate/sm90/gate.h"

namespace moesaic::cuda {
namespace {

GateParams gate_shape(std::int64_t tokens, std::int32_t experts, std::int32_t hidden) {
  GateParams p;
  p.tokens = tokens;
  p.experts = experts;
  p.hidden = hidden;
  return p;
}

// An H100 PCIe: what is measured on 132 multiprocessors, in proportion.
const DeviceTraits kPcie = hopper_traits(114);

TEST(GatePlan, SmallerPartsHaveRoomForFewerClusters) {
  const DeviceTraits sxm;
  EXPECT_EQ(sxm.clusters_at_once(1), 132);
  EXPECT_EQ(sxm.clusters_at_once(4), 30);
  EXPECT_EQ(sxm.clusters_at_once(8), 15);
  EXPECT_EQ(kPcie.clusters_at_once(1), 114);
  EXPECT_EQ(kPcie.clusters_at_once(2), 57);
  EXPECT_EQ(kPcie.clusters_at_once(4), 25);
  EXPECT_EQ(kPcie.clusters_at_once(8), 12);
  EXPECT_EQ(kPcie.sure_clusters_of_8, 10);
}

TEST(GatePlan, SmallerPartsGetFewerLines) {
  // Three clusters of experts: four lines are twelve clusters at once, of which ten are sure.
  EXPECT_EQ(resident_weights_lines(gate_shape(128, 96, 7168)), 4);
  EXPECT_EQ(resident_weights_lines(gate_shape(128, 96, 7168), kPcie), 2);
  EXPECT_EQ(choose_gate_kernel(gate_shape(128, 96, 4096), kPcie), GateKernel::kResidentWeights);
}

TEST(GatePlan, SmallerPartsGetOtherTilesInThePipeline) {
  const auto grid = [](std::int64_t tokens, std::int32_t hidden, const DeviceTraits& device) {
    const TiledPipelineGrid g = tiled_pipeline_grid(gate_shape(tokens, 128, hidden), device);
    return std::tuple(g.tokens, g.experts, g.cluster);
  };
  // 128 tiles of 64 tokens are one wave of 132 blocks, but two of 114.
  EXPECT_EQ(grid(8192, 2048, {}), std::tuple(64, 128, 1));
  EXPECT_EQ(grid(8192, 2048, kPcie), std::tuple(128, 128, 1));
  // 15 clusters of eight in a wave, or 12.
  EXPECT_EQ(grid(1920, 7168, {}), std::tuple(128, 128, 8));
  EXPECT_EQ(grid(1920, 7168, kPcie), std::tuple(128, 128, 4));
}

}  // namespace
}  // namespace moesaic::cuda
