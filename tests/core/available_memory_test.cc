#include "core/available_memory.h"

#include <gtest/gtest.h>

#include "moesaic/tensor.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

TEST(AvailableMemory, IsWhatTheMachineHasAndTheGroupLeaves) {
  const char* const meminfo =
      "MemTotal:       2097152 kB\nMemFree: 1 kB\nMemAvailable:    1048576 kB\nSwapFree: 1024 kB\n";
  EXPECT_EQ(available_memory(meminfo, "", "", ""), 1025 * kMiB);
  EXPECT_EQ(available_memory(meminfo, "max\n", "4096\n", "file 0\n"), 1025 * kMiB);
  EXPECT_EQ(available_memory("", "", "", ""), std::nullopt);
  EXPECT_EQ(available_memory("MemAvailable: much", "", "", ""), std::nullopt);
  // 512 MiB, of which 200 are taken and 50 of those are pages of files.
  const char* const stat = "anon 1\nfile 52428800\nkernel_file 7\n";
  EXPECT_EQ(available_memory(meminfo, "536870912\n", "209715200\n", stat), 362 * kMiB);
  EXPECT_EQ(available_memory("", "1\n", "2\n", ""), 0);
}

// Where memory is promised beyond what there is, its first use would end the process.
TEST(AvailableMemory, ATensorThatDoesNotFitIsRefused) {
  const auto there = available_memory();
  if (!there) GTEST_SKIP() << "neither /proc/meminfo nor a control group says";
  const std::int64_t bytes = *there + *there / 8 + 2048 * kMiB;
  test::expect_refusal(Tensor::uninitialized(DType::kU8, {bytes}).status(),
                       StatusCode::kOutOfMemory, {"available"});
  EXPECT_TRUE(Tensor::uninitialized(DType::kU8, {kMiB}).ok());
}

}  // namespace
}  // namespace moesaic
