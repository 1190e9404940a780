// The work list on the device against what follows from the ids. Skipped, visibly, without a
// device.
#include "permute/cuda_align.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "support/cuda_device.h"
#include "support/random.h"

namespace moesaic::cuda {
namespace {

using test::DeviceBytes;
using test::Rng;

// Few pairs are listed by comparing, more by counting: what follows from the ids is the same.
TEST(CudaAlign, ExpertsAscendAndSoDoTheirPairs) {
  REQUIRE_HOPPER();
  constexpr std::int32_t kPairs = 320, kLocal = 24, kRecord = 4;
  Rng rng(5);
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  for (int i = 0; i < kPairs; ++i) {
    ids.push_back(static_cast<std::int32_t>(rng.integer(-1, kLocal)));  // the last is too large
    weights.push_back(static_cast<float>(i));
  }
  const DeviceBytes all_ids(ids), all_weights(weights);
  const auto list = [&](std::int32_t pairs) {
    const DeviceBytes pair_of_row(kPairs * 4), weight_of_row(kPairs * 4), row_of_pair(kPairs * 4);
    const DeviceBytes groups(kPairs * 16), done(kPairs * 4), control(8), bands(4);
    AlignParams a;
    a.topk_ids = all_ids.as<std::int32_t>();
    a.topk_weights = all_weights.as<float>();
    a.pairs = pairs;
    a.num_experts = a.num_local_experts = kLocal;
    a.rows_per_record = kRecord;
    a.max_groups = kPairs;
    a.pair_of_row = pair_of_row.as<std::int32_t>();
    a.weight_of_row = weight_of_row.as<float>();
    a.row_of_pair = row_of_pair.as<std::int32_t>();
    a.groups = groups.as<GroupRecord>();
    a.group_done = done.as<std::uint32_t>();
    a.next_item = control.as<std::uint32_t>();
    a.num_groups = a.next_item + 1;
    a.band_done = bands.as<std::uint32_t>();
    a.bands = 1;
    EXPECT_EQ(launch_align(a, nullptr, nullptr), 0);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(control.values<std::uint32_t>()[0], 0U);
    // What follows from the ids: experts ascending, pairs of an expert ascending.
    const auto rows = row_of_pair.values<std::int32_t>(),
               pairs_of = pair_of_row.values<std::int32_t>();
    const auto weights_of = weight_of_row.values<float>();
    const auto records = groups.values<GroupRecord>();
    std::int32_t row = 0;
    std::uint32_t record = 0;
    for (std::int32_t e = 0; e < kLocal; ++e) {
      const std::int32_t first = row;
      const std::uint32_t first_record = record;
      for (std::int32_t p = 0; p < pairs; ++p) {
        if (ids[static_cast<std::size_t>(p)] != e) continue;
        EXPECT_EQ(rows[static_cast<std::size_t>(p)], row);
        EXPECT_EQ(pairs_of[static_cast<std::size_t>(row)], p);
        EXPECT_EQ(weights_of[static_cast<std::size_t>(row)], weights[static_cast<std::size_t>(p)]);
        if ((row - first) % kRecord == 0) ++record;
        ++row;
      }
      for (std::uint32_t g = first_record; g < record; ++g) {
        EXPECT_EQ(records[g].expert, e);
        EXPECT_EQ(records[g].first_row, first);
        EXPECT_EQ(records[g].rows, row - first);
        EXPECT_EQ(records[g].first_group, static_cast<std::int32_t>(first_record));
      }
    }
    EXPECT_EQ(control.values<std::uint32_t>()[1], record);
    for (std::int32_t p = 0; p < pairs; ++p) {
      const std::int32_t id = ids[static_cast<std::size_t>(p)];
      if (id < 0 || id >= kLocal) {
        EXPECT_EQ(rows[static_cast<std::size_t>(p)], -1);
      }
    }
  };
  for (const std::int32_t pairs : {1, 3, 31, 32, 33, 255, 256, 257, 320}) {
    SCOPED_TRACE(pairs);
    list(pairs);
  }
}

}  // namespace
}  // namespace moesaic::cuda
