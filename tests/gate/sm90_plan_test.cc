// Which gate kernels and grids are chosen for a device, and weights as sums: host code, so without
// one.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "gate/sm90/bf16_parts.h"
#include "gate/sm90/gate.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"
#include "support/random.h"

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

// Fewer multiprocessors than a cluster has blocks: no such cluster.
TEST(GatePlan, SmallDevicesHaveSmallClusters) {
  for (const int sms : {1, 3, 4, 8}) {
    const TiledPipelineGrid g =
        tiled_pipeline_grid(gate_shape(1920, 256, 7168), hopper_traits(sms));
    EXPECT_LE(g.cluster, sms);
  }
}

// "16:one_wave ...": the last number of tokens of each range and its kernel; the last has no end.
std::string ranges(const GateParams& p, const DeviceTraits& device = {}) {
  const GatePlan plan(p, device);
  std::string text;
  for (const GateRange& range : plan.ranges()) {
    const bool open = range.last_tokens == std::numeric_limits<std::int64_t>::max();
    const std::string_view name = gate_kernel_name(range.kernel);
    text += (open ? "*" : std::to_string(range.last_tokens)) + ":" +
            std::string(name.substr(std::string_view("sm90_gate_").size())) + " ";
    // The kernel of every call is the range's that it lies in.
    EXPECT_EQ(plan.of(range.last_tokens), range.kernel);
    if (!open) {
      EXPECT_NE(plan.of(range.last_tokens + 1), range.kernel);
    }
  }
  return text;
}

TEST(GatePlan, GivesEveryNumberOfTokensAKernel) {
  EXPECT_EQ(ranges(gate_shape(0, 256, 7168)), "16:one_wave 82:resident_weights *:tiled_pipeline ");
  EXPECT_EQ(ranges(gate_shape(0, 128, 4096)), "16:one_wave 128:resident_weights *:tiled_pipeline ");
  EXPECT_EQ(ranges(gate_shape(0, 8, 32768)), "8:one_wave *:tiled_pipeline ");
  EXPECT_EQ(ranges(gate_shape(0, 8, 40000)), "*:tiled_pipeline ");
  EXPECT_EQ(ranges(gate_shape(0, 8, 7163)), "*:warp ");
  GateParams f32 = gate_shape(0, 256, 3072);
  f32.weight_f32 = true;
  EXPECT_EQ(ranges(f32), "32:fp32_rows *:warp ");
  f32.x_dtype = DType::kF16;
  EXPECT_EQ(ranges(f32), "*:warp ");
  // Three parts: rows of 9216 numbers; short ones would be read again more than once in a chunk.
  GateParams parts = gate_shape(0, 256, 3072);
  parts.parts = 3;
  EXPECT_EQ(parts.depth(), 9216);
  EXPECT_EQ(ranges(parts), ranges(gate_shape(0, 256, 9216)));
  parts.hidden = 56;
  EXPECT_EQ(ranges(parts), "*:warp ");
  parts.hidden = 350'000;
  EXPECT_EQ(ranges(parts), "*:warp ");
  EXPECT_EQ(GatePlan().of(1), GateKernel::kWarpPerLogit) << "a plan of nothing";
}

// Every weight is the sum of its parts, in float64 without a rounding; as many as the dtype needs.
TEST(Bf16Parts, AddUpToTheValue) {
  constexpr std::int64_t kRows = 5, kColumns = 24;
  test::Rng rng(12);
  for (const auto& [dtype, want] :
       {std::pair{DType::kBF16, 1}, {DType::kF16, 2}, {DType::kF32, 3}}) {
    const Tensor weight = test::random_normal(rng, dtype, {kRows, kColumns});
    std::vector<float> values(kRows * kColumns);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = load_as_f32(weight.data(), dtype, static_cast<std::int64_t>(i));
    }
    const int count = count_bf16_parts(values);
    ASSERT_EQ(count, want) << dtype_name(dtype);
    std::vector<std::uint16_t> parts(values.size() * static_cast<std::size_t>(count));
    split_into_bf16_parts(values, kColumns, count, parts);
    for (std::int64_t row = 0; row < kRows; ++row) {
      for (std::int64_t k = 0; k < kColumns; ++k) {
        double sum = 0;
        for (int part = 0; part < count; ++part) {
          sum +=
              f32_from_bf16(parts[static_cast<std::size_t>((row * count + part) * kColumns + k)]);
        }
        EXPECT_EQ(sum, values[static_cast<std::size_t>(row * kColumns + k)]) << row << ' ' << k;
      }
    }
  }
}

TEST(Bf16Parts, NotEveryValueHasThem) {
  const auto count = [](float v) { return count_bf16_parts({&v, 1}); };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(count(0.0F), 1);
  EXPECT_EQ(count(-kInfinity), 1);
  EXPECT_EQ(count(1.0F + 0x1p-23F), 2);
  EXPECT_EQ(count(1.0F + 0x1p-9F + 0x1p-23F), 3);
  // Less than the smallest bf16 number is left; the largest F32 rounds to infinity.
  EXPECT_EQ(count(0x1p-126F + 0x1p-149F), 0);
  EXPECT_EQ(count(std::numeric_limits<float>::max()), 0);
  EXPECT_EQ(count(std::numeric_limits<float>::quiet_NaN()), 0);
}

}  // namespace
}  // namespace moesaic::cuda
