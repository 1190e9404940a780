// What opening a safetensors file costs, counted instead of timed: basic blocks that the reader and
// its JSON parser run through (this binary's copy of them is compiled with
// -fsanitize-coverage=trace-pc), memory that they request, bytes that they read from the file. All
// are linear in the header, with the constants below, on any machine however slow or busy.
// Not counted: instructions within libc and libstdc++ (copies, number parsing), which see each byte
// a constant number of times.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "checkpoint/container/safetensors.h"
#include "checkpoint/counts.h"
#include "checkpoint/large_headers.h"
#include "support/count_allocations.h"

namespace moesaic::test {
namespace {

// Of one open.
struct Cost {
  std::uint64_t steps, read_bytes, allocations, allocated_bytes;
};

constexpr std::uint64_t kBytes = 1 << 15;
constexpr std::uint64_t kTimes = 16;  // the larger header is this many times the smaller one
// Each case prints its own. The most, with g++ 12: 42 with -O2, 207 without optimisation, which
// merges blocks; both of LongShape, a dimension every two bytes.
constexpr double kMaxStepsPerByte = 300;
// 19.6: the parser's complaint about an integer of 10^8 digits is made from several copies of it.
constexpr double kMaxAllocatedPerByte = 24;
constexpr double kMaxAllocationsPerByte = 0.01;
// Linear is 16, sorting 16 * log(16 n) / log(n) = 22; quadratic would be 256.
constexpr double kMaxGrowth = 1.5 * kTimes;

class HeaderSteps : public testing::TestWithParam<LargeHeader> {
 protected:
  Cost open(std::uint64_t header_bytes) {
    const auto path =
        std::filesystem::temp_directory_path() / ("header-steps-" + std::to_string(::getpid()));
    {
      std::ofstream out(path, std::ios::binary);
      write_large_header(GetParam(), header_bytes, out);
    }
    Cost result{};
    {
      const std::string name = path.string();
      counts() = {};
      const long calls = allocations(), bytes = allocated_bytes();
      const auto file = checkpoint::SafetensorsFile::open(name, FileAccess::kCopy);
      result = {counts().steps, counts().read_bytes,
                static_cast<std::uint64_t>(allocations() - calls),
                static_cast<std::uint64_t>(allocated_bytes() - bytes)};
      const Status status = file.ok() ? Status() : file.status();
      EXPECT_EQ(status.code(), GetParam().want) << status.to_string();
    }
    std::filesystem::remove(path);
    return result;
  }
};

TEST_P(HeaderSteps, AreLinearInTheHeader) {
  const Cost small = open(kBytes);
  const Cost large = open(kTimes * kBytes);
  const auto per_byte = [](std::uint64_t n) {
    return static_cast<double>(n) / static_cast<double>(kTimes * kBytes);
  };
  const double growth = static_cast<double>(large.steps) / static_cast<double>(small.steps);
  std::printf("%-22s %6.1f steps, %5.2f bytes of memory, %6.4f allocations per byte; x %.1f\n",
              GetParam().name, per_byte(large.steps), per_byte(large.allocated_bytes),
              per_byte(large.allocations), growth);
  EXPECT_LE(per_byte(large.steps), kMaxStepsPerByte);
  EXPECT_LE(per_byte(large.allocated_bytes), kMaxAllocatedPerByte);
  EXPECT_LE(per_byte(large.allocations), kMaxAllocationsPerByte);
  EXPECT_LE(growth, kMaxGrowth);
  // The length and the header once, nothing of the data.
  EXPECT_EQ(large.read_bytes, 8 + kTimes * kBytes);
}

// The instrumentation is there: an empty count would satisfy every bound.
TEST_P(HeaderSteps, AreCounted) {
  if (GetParam().want == StatusCode::kOk) {
    EXPECT_GE(open(kBytes).steps, kBytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Large, HeaderSteps, testing::ValuesIn(large_headers()),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace moesaic::test
