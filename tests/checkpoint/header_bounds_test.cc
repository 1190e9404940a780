// Headers of the largest accepted size, each opened in a process of its own: the right answer, and
// a peak memory of a few times the header. Steps: header_steps_test. Seconds: bench/header_bench.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "checkpoint/container/safetensors.h"
#include "checkpoint/container_support.h"
#include "checkpoint/large_headers.h"
#include "core/instrumented.h"

namespace moesaic::test {
namespace {

constexpr double kMaxMemoryRatio = 8.0;  // of the header's size

constexpr bool kInstrumented = MOESAIC_INSTRUMENTED;

// Sanitizers need many times the memory and the steps: a tenth of the size, and no bound.
constexpr std::uint64_t kBytes =
    kInstrumented ? checkpoint::kMaxHeaderBytes / 10 : checkpoint::kMaxHeaderBytes;

class HeaderBounds : public testing::TestWithParam<LargeHeader> {};

TEST_P(HeaderBounds, PeakMemoryIsAFewTimesTheHeader) {
  const LargeHeader& header = GetParam();
  TempDir dir;
  const std::string path = dir.path("a");
  {
    std::ofstream out(path, std::ios::binary);
    write_large_header(header, kBytes, out);
  }
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto file = checkpoint::SafetensorsFile::open(path, FileAccess::kCopy);
    const StatusCode code = file.ok() ? StatusCode::kOk : file.status().code();
    if (code != header.want)
      std::fprintf(stderr, "%s\n", file.ok() ? "ok" : file.status().to_string().c_str());
    ::_exit(code == header.want ? 0 : 1);
  }
  int status = 0;
  rusage usage{};
  ASSERT_EQ(::wait4(child, &status, 0, &usage), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  const double ratio = static_cast<double>(usage.ru_maxrss) * 1024 / static_cast<double>(kBytes);
  std::printf("%-28s peak memory %4.1f x header\n", header.name, ratio);
  if (!kInstrumented) {
    EXPECT_LT(ratio, kMaxMemoryRatio);
  }
}

INSTANTIATE_TEST_SUITE_P(Large, HeaderBounds, testing::ValuesIn(large_headers()),
                         [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace moesaic::test
