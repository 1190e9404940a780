// The kernels of load balancing and of rows of another length, against the host's. Skipped, visibly,
// without a device.
#include "layer/sm90/device_balance.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "layer/eplb_case.h"
#include "moesaic/eplb.h"
#include "prepare_finalize/sm90/fit_rows.h"
#include "router/eplb_map.h"
#include "support/cuda_device.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::DeviceBytes;

constexpr std::int64_t kExperts = 12, kSlots = 16, kWindow = 3;

// Steps with other maps, lengths and ids, -1 and ids out of range among them.
TEST(DeviceBalance, MapsAndCountsAsTheHost) {
  REQUIRE_HOPPER();
  const auto device = cuda::DeviceBalance::create(0, kExperts, kSlots, kWindow).value();
  LoadWindow window = LoadWindow::create(kExperts, kWindow).value();
  std::vector<std::uint32_t> total(kSlots, 0);
  test::Rng rng(5);
  for (std::uint64_t step = 0; step < 9; ++step) {
    const ExpertMaps maps =
        make_expert_maps(test::random_map(step, kExperts, kSlots), kExperts).value();
    ASSERT_TRUE(device->set_maps(maps).ok());
    const bool record = step % 4 != 2;
    ASSERT_TRUE(device->set_recording(record).ok());
    std::vector<std::int32_t> load(kSlots, 0);
    // Two parts of a step, the positions of each from 0 on.
    for (const std::int64_t count : {step == 3 ? 0 : rng.integer(1, 5000), rng.integer(0, 40)}) {
      std::vector<std::int32_t> ids;
      for (std::int64_t i = 0; i < count; ++i) {
        ids.push_back(static_cast<std::int32_t>(rng.integer(-2, kExperts)));
      }
      std::vector<std::int32_t> want = ids;
      EplbState state;
      state.logical_to_physical = maps.logical_to_physical;
      state.replica_count = maps.replica_count;
      state.max_replicas = maps.max_replicas;
      state.load = load;
      state.record = record;
      router::map_logical_to_physical(state, kExperts, count, 1, nullptr, want.data());
      if (count == 0) continue;
      const DeviceBytes from(ids), to(count * 4);
      ASSERT_TRUE(device->map(nullptr, from.as<std::int32_t>(), count, to.as<std::int32_t>()).ok());
      EXPECT_EQ(to.values<std::int32_t>(), want) << "step " << step;
    }
    ASSERT_TRUE(step % 2 == 0 ? device->end_call(nullptr).ok() : device->end_step().ok());
    if (record) {
      ASSERT_TRUE(window.record(load, maps.physical_to_logical).ok());
    }
    for (std::size_t s = 0; s < kSlots; ++s) total[s] += static_cast<std::uint32_t>(load[s]);
    std::vector<double> measured(kExperts, -1.0);
    ASSERT_TRUE(device->window_load(measured).ok());
    EXPECT_EQ(measured, std::vector<double>(window.load().begin(), window.load().end()))
        << "step " << step;
    std::vector<std::uint32_t> counted(kSlots, 1);
    ASSERT_TRUE(device->total_load(counted).ok());
    EXPECT_EQ(counted, total) << "step " << step;
  }
}

TEST(DeviceBalance, SlotsAreReadAndWritten) {
  REQUIRE_HOPPER();
  const auto device = cuda::DeviceBalance::create(0, 4, 4, 1).value();
  std::vector<std::uint8_t> rows(4 * 37);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::uint8_t>(i);
  const DeviceBytes there(rows);
  const ExpertPart part{"w",
                        TensorView(there.as<std::byte>(), DType::kU8, {4, 37}, Device::cuda(0))};
  std::vector<std::byte> slot(37);
  ASSERT_TRUE(device->read(part, 2, slot.data()).ok());
  ASSERT_TRUE(device->write(part, 1, slot.data()).ok());
  std::copy_n(rows.begin() + 2 * 37, 37, rows.begin() + 37);
  EXPECT_EQ(there.values<std::uint8_t>(), rows);
}

TEST(FitRows, LongerRowsEndInZerosAndShorterOnesAreTheFront) {
  REQUIRE_HOPPER();
  for (const int element : {2, 4}) {
    for (const auto& [from_columns, to_columns] : {std::pair{60, 64}, {64, 60}, {7, 7}, {1, 8}}) {
      for (const std::int64_t rows : {0, 1, 300}) {
        const auto size = static_cast<std::size_t>(element);
        std::vector<std::uint8_t> from(static_cast<std::size_t>(rows * from_columns) * size);
        test::Rng rng(9);
        for (std::uint8_t& v : from) v = static_cast<std::uint8_t>(rng.next());
        std::vector<std::uint8_t> want(static_cast<std::size_t>(rows * to_columns) * size, 0);
        for (std::int64_t r = 0; r < rows; ++r) {
          std::copy_n(from.begin() + r * from_columns * element,
                      std::min(from_columns, to_columns) * element,
                      want.begin() + r * to_columns * element);
        }
        const DeviceBytes there(from), to(static_cast<std::int64_t>(want.size()));
        ASSERT_EQ(cuda::launch_fit_rows(
                      {there.as<void>(), to.as<void>(), rows, from_columns, to_columns, element},
                      nullptr),
                  0);
        EXPECT_EQ(to.values<std::uint8_t>(), want)
            << element << ' ' << from_columns << ' ' << to_columns << ' ' << rows;
      }
    }
  }
}

}  // namespace
}  // namespace moesaic
