// The work list of slabs on the device against what follows from the counts. Skipped, visibly,
// without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "permute/sm90/align_batched.h"
#include "support/cuda_device.h"
#include "support/random.h"

namespace moesaic::cuda {
namespace {

using test::DeviceBytes;

// What follows from the counts: experts ascending, the first rows of each slab.
void expect_list(const std::vector<std::int32_t>& counts, std::int32_t slab_rows,
                 std::int32_t record) {
  SCOPED_TRACE(testing::Message() << counts.size() << " slabs of " << slab_rows << ", records of "
                                  << record);
  constexpr std::int32_t kBands = 3;
  const auto experts = static_cast<std::int32_t>(counts.size());
  const std::int64_t pairs = std::int64_t{experts} * slab_rows;
  const std::int64_t bound = max_group_records(pairs, experts, record);
  const DeviceBytes on_device(counts), pair_of_row(pairs * 4), groups(bound * 16), done(bound * 4),
      control(12), bands((kBands + pairs) * 4);
  BatchedListParams p;
  p.counts = on_device.as<std::int32_t>();
  p.experts = experts;
  p.slab_rows = slab_rows;
  p.rows_per_record = record;
  p.pair_of_row = pair_of_row.as<std::int32_t>();
  p.groups = groups.as<GroupRecord>();
  p.group_done = done.as<std::uint32_t>();
  p.next_item = control.as<std::uint32_t>();
  p.num_groups = p.next_item + 1;
  p.num_rows = p.next_item + 2;
  p.band_done = bands.as<std::uint32_t>();
  p.bands = kBands;
  p.zero_rows = true;
  ASSERT_EQ(launch_batched_list(p, nullptr, {}, nullptr), 0);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  std::vector<std::int32_t> want;
  std::vector<GroupRecord> records;
  for (std::int32_t e = 0; e < experts; ++e) {
    const std::int32_t rows = std::clamp(counts[static_cast<std::size_t>(e)], 0, slab_rows);
    const auto first = static_cast<std::int32_t>(want.size());
    const auto first_group = static_cast<std::int32_t>(records.size());
    for (std::int32_t i = 0; i < rows; ++i) {
      if (i % record == 0) records.push_back({e, first, rows, first_group});
      want.push_back(e * slab_rows + i);
    }
  }
  EXPECT_EQ(control.values<std::uint32_t>(),
            (std::vector<std::uint32_t>{0, static_cast<std::uint32_t>(records.size()),
                                        static_cast<std::uint32_t>(want.size())}));
  // What lies behind is as it was.
  constexpr std::uint32_t kPoison = 0xFFFFFFFF;
  std::vector<std::uint32_t> zeros(kBands + want.size(), 0U);
  zeros.resize(static_cast<std::size_t>(kBands + pairs), kPoison);
  EXPECT_EQ(bands.values<std::uint32_t>(), zeros);
  zeros.assign(records.size(), 0U);
  zeros.resize(static_cast<std::size_t>(bound), kPoison);
  EXPECT_EQ(done.values<std::uint32_t>(), zeros);
  const auto got = groups.values<GroupRecord>();
  for (std::size_t g = 0; g < records.size(); ++g) {
    ASSERT_EQ(got[g].expert, records[g].expert) << g;
    ASSERT_EQ(got[g].first_row, records[g].first_row) << g;
    ASSERT_EQ(got[g].rows, records[g].rows) << g;
    ASSERT_EQ(got[g].first_group, records[g].first_group) << g;
  }
  want.resize(static_cast<std::size_t>(pairs), -1);
  EXPECT_EQ(pair_of_row.values<std::int32_t>(), want);
  for (const DeviceBytes* memory : {&pair_of_row, &groups, &done, &control, &bands}) {
    EXPECT_TRUE(memory->margin_is_intact());
  }
}

TEST(CudaAlignBatched, ExpertsAscendAndRowsFollowTheCounts) {
  REQUIRE_HOPPER();
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  expect_list({0}, 1, 16);
  expect_list({1}, 1, 16);
  expect_list({3, 0, 5}, 8, 4);
  expect_list({-1, 9, kLeast, kMost, 8, 0, 7}, 8, 4);
  expect_list({0, 0, 0, 0}, 5, 32);
  test::Rng rng(6);
  for (const std::int32_t experts : {2, 31, 33, 128, 1000, 1024}) {
    for (const std::int32_t rows : {1, 7, 300}) {
      std::vector<std::int32_t> counts;
      for (std::int32_t e = 0; e < experts; ++e) {
        counts.push_back(static_cast<std::int32_t>(rng.integer(-2, rows + 2)));
      }
      expect_list(counts, rows, 16);
      expect_list(counts, rows, 256);
      expect_list(std::vector<std::int32_t>(counts.size(), rows), rows, 64);
    }
  }
}

}  // namespace
}  // namespace moesaic::cuda
