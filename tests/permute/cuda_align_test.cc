// The work list on the device against what follows from the ids. Skipped, visibly, without a
// device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "permute/sm90/align.h"
#include "support/cuda_device.h"
#include "support/random.h"

namespace moesaic::cuda {
namespace {

using test::DeviceBytes;
using test::Rng;

// Ids and weights on the device, and the list that launch_align makes of them.
struct List {
  DeviceBytes ids, weights, pair_of_row, weight_of_row, row_of_pair, groups, done, control, bands;
  AlignParams params;

  List(const std::vector<std::int32_t>& all_ids, const std::vector<float>& all_weights,
       std::int32_t experts, std::int32_t record, std::int32_t num_bands)
      : List(all_ids, all_weights, std::ssize(all_ids),
             max_group_records(std::ssize(all_ids), experts, record), num_bands) {
    params.num_experts = params.num_local_experts = experts;
    params.rows_per_record = record;
  }

 private:
  List(const std::vector<std::int32_t>& all_ids, const std::vector<float>& all_weights,
       std::int64_t pairs, std::int64_t bound, std::int32_t num_bands)
      : ids(all_ids),
        weights(all_weights),
        pair_of_row(pairs * 4),
        weight_of_row(pairs * 4),
        row_of_pair(pairs * 4),
        groups(bound * 16),
        done(bound * 4),
        control(12),
        bands(num_bands * 4) {
    params.topk_ids = ids.as<std::int32_t>();
    params.topk_weights = weights.as<float>();
    params.pairs = static_cast<std::int32_t>(pairs);
    params.max_groups = static_cast<std::int32_t>(bound);
    params.pair_of_row = pair_of_row.as<std::int32_t>();
    params.weight_of_row = weight_of_row.as<float>();
    params.row_of_pair = row_of_pair.as<std::int32_t>();
    params.groups = groups.as<GroupRecord>();
    params.group_done = done.as<std::uint32_t>();
    params.next_item = control.as<std::uint32_t>();
    params.num_groups = params.next_item + 1;
    params.band_done = bands.as<std::uint32_t>();
    params.bands = num_bands;
  }
};

// What follows from the ids: experts ascending, pairs of an expert ascending. live: not empty, rows that
// are there of as many sources; the other pairs have ids too, and no part in the list.
void expect_list(std::int32_t pairs, std::int32_t local, bool mapped,
                 const std::vector<std::int32_t>& live = {}, std::int32_t top_k = 1) {
  SCOPED_TRACE(testing::Message() << pairs << " pairs, " << local << " experts, mapped " << mapped
                                  << ", " << live.size() << " sources of rows");
  constexpr std::int32_t kRecord = 4, kBands = 3;
  Rng rng(5);
  std::vector<std::int32_t> ids, map, experts;  // experts: what the ids stand for, -1 for none
  std::vector<float> weights;
  for (std::int32_t e = 0; mapped && e < local; ++e) map.push_back(e % 3 == 1 ? -1 : local - 1 - e);
  for (std::int32_t i = 0; i < pairs; ++i) {
    const auto id = static_cast<std::int32_t>(rng.integer(-1, local));  // the last is too large
    const bool known = id >= 0 && id < local;
    ids.push_back(id);
    experts.push_back(!known ? -1 : mapped ? map[static_cast<std::size_t>(id)] : id);
    weights.push_back(static_cast<float>(i));
  }
  List list(ids, weights, local, kRecord, kBands);
  const DeviceBytes all_map(map);
  if (mapped) list.params.expert_map = all_map.as<std::int32_t>();
  const DeviceBytes all_live(live);
  constexpr std::int32_t kStays = -77;
  if (!live.empty()) {
    SomeRows& some = list.params.rows;
    some.live = all_live.as<std::int32_t>();
    some.sources = static_cast<std::int32_t>(live.size());
    some.places = pairs / top_k / some.sources;
    some.top_k = top_k;
    list.row_of_pair.upload(
        std::vector<std::int32_t>(static_cast<std::size_t>(pairs), kStays).data());
  }
  const auto is_there = [&](std::int32_t pair) {
    if (live.empty()) return true;
    const std::int32_t places = list.params.rows.places, row = pair / top_k;
    return row % places < live[static_cast<std::size_t>(row / places)];
  };
  ASSERT_EQ(launch_align(list.params, nullptr, {}, nullptr), 0);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(list.control.values<std::uint32_t>()[0], 0U);
  EXPECT_EQ(list.bands.values<std::uint32_t>(), std::vector<std::uint32_t>(kBands, 0U));
  EXPECT_EQ(list.done.values<std::uint32_t>(),
            std::vector<std::uint32_t>(static_cast<std::size_t>(list.params.max_groups), 0U));
  const auto rows = list.row_of_pair.values<std::int32_t>(),
             pairs_of = list.pair_of_row.values<std::int32_t>();
  const auto weights_of = list.weight_of_row.values<float>();
  const auto records = list.groups.values<GroupRecord>();
  std::vector<std::vector<std::int32_t>> of_expert(static_cast<std::size_t>(local));
  for (std::int32_t p = 0; p < pairs; ++p) {
    const std::int32_t e = experts[static_cast<std::size_t>(p)];
    if (!is_there(p)) {
      ASSERT_EQ(rows[static_cast<std::size_t>(p)], kStays);
    } else if (e >= 0) {
      of_expert[static_cast<std::size_t>(e)].push_back(p);
    } else {
      ASSERT_EQ(rows[static_cast<std::size_t>(p)], -1);
    }
  }
  std::int32_t row = 0;
  std::uint32_t record = 0;
  for (std::int32_t e = 0; e < local; ++e) {
    const std::int32_t first = row;
    const std::uint32_t first_record = record;
    for (const std::int32_t p : of_expert[static_cast<std::size_t>(e)]) {
      ASSERT_EQ(rows[static_cast<std::size_t>(p)], row);
      ASSERT_EQ(pairs_of[static_cast<std::size_t>(row)], p);
      ASSERT_EQ(weights_of[static_cast<std::size_t>(row)], weights[static_cast<std::size_t>(p)]);
      if ((row - first) % kRecord == 0) ++record;
      ++row;
    }
    for (std::uint32_t g = first_record; g < record; ++g) {
      ASSERT_EQ(records[g].expert, e);
      ASSERT_EQ(records[g].first_row, first);
      ASSERT_EQ(records[g].rows, row - first);
      ASSERT_EQ(records[g].first_group, static_cast<std::int32_t>(first_record));
    }
  }
  EXPECT_EQ(list.control.values<std::uint32_t>()[1], record);
}

// Up to kComparedPairs pairs are listed by comparing, more by counting.
TEST(CudaAlign, ExpertsAscendAndSoDoTheirPairs) {
  REQUIRE_HOPPER();
  for (const std::int32_t pairs : {1, 3, 31, 32, 33, 255, 256, 257, 320, 1023, 1024}) {
    expect_list(pairs, 24, /*mapped=*/false);
  }
  expect_list(1000, 700, /*mapped=*/true);
}

// More than kComparedPairs of them, in one block and in clusters.
TEST(CudaAlign, RowsThatAreNotThereAreNotListed) {
  REQUIRE_HOPPER();
  expect_list(4 * 32 * 6, 24, /*mapped=*/false, {32, 0, 1, 17}, 6);
  expect_list(3 * 100 * 2, 24, /*mapped=*/true, {0, 0, 0}, 2);
  for (const std::int32_t first : {0, 5, 4096}) {
    expect_list(4 * 4096 * 8, 40, /*mapped=*/true, {first, 4096, 3, 0}, 8);
    expect_list(32 * 512 * 2, 300, /*mapped=*/false,
                std::vector<std::int32_t>(32, std::min(first, 512)), 2);
  }
}

// A list with room for some rows: all of them, or none and how many there would be.
TEST(CudaAlign, AListThatIsTooLongIsNotMade) {
  REQUIRE_HOPPER();
  constexpr std::int32_t kExperts = 24, kRecord = 4;
  for (const std::int32_t pairs : {300, 1024, 1025, 20000, 131073}) {
    SCOPED_TRACE(pairs);
    Rng rng(9);
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    std::int32_t rows = 0;
    for (std::int32_t i = 0; i < pairs; ++i) {
      ids.push_back(static_cast<std::int32_t>(rng.integer(0, 3 * kExperts)));
      weights.push_back(static_cast<float>(i));
      rows += ids.back() < kExperts ? 1 : 0;
    }
    List list(ids, weights, kExperts, kRecord, /*num_bands=*/1);
    const auto made = [&] {
      EXPECT_EQ(launch_align(list.params, nullptr, {}, nullptr), 0);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      return list.row_of_pair.values<std::int32_t>();
    };
    const std::vector<std::int32_t> want = made();
    const auto records = list.control.values<std::uint32_t>()[1];
    for (const std::int32_t capacity : {rows + 7, rows, rows - 1, rows / 2, 1}) {
      SCOPED_TRACE(capacity);
      const std::int64_t groups = max_group_records(capacity, kExperts, kRecord);
      const DeviceBytes pair_of_row(2 * capacity * 4), weight_of_row(capacity * 4),
          few_groups(groups * 16), done(groups * 4);
      list.params.capacity = capacity;
      list.params.max_groups = static_cast<std::int32_t>(groups);
      list.params.pair_of_row = pair_of_row.as<std::int32_t>();
      list.params.weight_of_row = weight_of_row.as<float>();
      list.params.groups = few_groups.as<GroupRecord>();
      list.params.group_done = done.as<std::uint32_t>();
      const std::vector<std::int32_t> got = made();
      for (const DeviceBytes* b : {&pair_of_row, &weight_of_row, &few_groups, &done}) {
        EXPECT_TRUE(b->margin_is_intact());
      }
      EXPECT_EQ(list.control.values<std::uint32_t>()[2], static_cast<std::uint32_t>(rows));
      const bool fits = rows <= capacity;
      EXPECT_EQ(list.control.values<std::uint32_t>()[1], fits ? records : 0U);
      EXPECT_EQ(got, fits ? want : std::vector<std::int32_t>(want.size(), -1));
      if (!fits) continue;
      const auto pairs_of = pair_of_row.values<std::int32_t>();
      for (std::int32_t row = 0; row < rows; ++row) {
        ASSERT_EQ(want[static_cast<std::size_t>(pairs_of[static_cast<std::size_t>(row)])], row);
        ASSERT_EQ(pairs_of[static_cast<std::size_t>(capacity + row)], row);
      }
    }
  }
}

// Up to eight steps of 8192 pairs each have their cluster of blocks; later ones share them.
TEST(CudaAlign, ClustersOfBlocksMakeTheSameList) {
  REQUIRE_HOPPER();
  for (const std::int32_t pairs :
       {1025, 2048, 8191, 8192, 8193, 24000, 65536, 65537, 131073, 300000}) {
    expect_list(pairs, 24, /*mapped=*/false);
  }
  expect_list(40000, kMaxAlignedExperts, /*mapped=*/true);
  expect_list(20000, 1, /*mapped=*/false);
}

// Rows quantised beside the list, some of them by the blocks that made it: every group once, with
// the bits of the kernel that only quantises.
TEST(CudaAlign, QuantisesBesideTheList) {
  REQUIRE_HOPPER();
  struct Case {
    std::int64_t tokens, columns;
    std::int32_t top_k;
  };
  for (const Case& c : {Case{5, 136, 2}, Case{400, 384, 3}, Case{9001, 1408, 1}}) {
    SCOPED_TRACE(c.tokens);
    const auto pairs = static_cast<std::int32_t>(c.tokens) * c.top_k;
    Rng rng(11);
    std::vector<std::uint16_t> x;
    for (std::int64_t i = 0; i < c.tokens * c.columns; ++i) {
      // bf16 of magnitudes about 1.
      const auto u = static_cast<std::uint32_t>(rng.integer(0, 0xFFFF));
      x.push_back(static_cast<std::uint16_t>((u & 0x83FF) | 0x3E00));
    }
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(pairs), 1);
    const std::vector<float> weights(ids.size(), 1.0F);
    const DeviceBytes rows(x);
    const List list(ids, weights, /*experts=*/2, /*record=*/16, /*num_bands=*/1);
    const std::int64_t groups = (c.columns + 127) / 128;
    const auto quantized = [&](bool beside) {
      const DeviceBytes codes(c.tokens * c.columns), scale(groups * c.tokens * 4);
      QuantRowsParams q;
      q.x = rows.as<std::uint16_t>();
      q.tokens = q.scale_stride = c.tokens;
      q.columns = c.columns;
      q.q = codes.as();
      q.scale = scale.as<float>();
      EXPECT_EQ(
          beside ? launch_align(list.params, &q, {}, nullptr) : launch_quant_rows(q, {}, nullptr),
          0);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_TRUE(codes.margin_is_intact() && scale.margin_is_intact());
      return std::pair(codes.values<std::uint8_t>(), scale.values<std::uint32_t>());
    };
    const auto got = quantized(true), want = quantized(false);
    EXPECT_TRUE(got.first == want.first);
    EXPECT_TRUE(got.second == want.second);
    EXPECT_NE(want.second.back(), 0xFFFFFFFFU) << "the last group";
  }
}

}  // namespace
}  // namespace moesaic::cuda
