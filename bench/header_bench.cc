// Seconds that opening a safetensors file takes whose header is as large as is accepted. What the
// reader does is bounded by tests (checkpoint_header_steps_test, checkpoint_header_bounds_test);
// this is what it comes to on this machine.
//   header_bench [HEADER_BYTES]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "checkpoint/container/safetensors.h"
#include "checkpoint/large_headers.h"

int main(int argc, char** argv) {
  using namespace moesaic;
  using namespace moesaic::checkpoint;
  using Clock = std::chrono::steady_clock;
  constexpr int kRepeats = 3;
  const std::uint64_t bytes = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : kMaxHeaderBytes;
  if (bytes < 1000 || bytes > kMaxHeaderBytes) {
    fmt::print(stderr, "usage: header_bench [HEADER_BYTES, 1000 to {}]\n", kMaxHeaderBytes);
    return 2;
  }
  const auto path = std::filesystem::temp_directory_path() / "moesaic-header-bench";
  fmt::print("header of {} bytes, best of {}\n", bytes, kRepeats);
  int wrong = 0;
  for (const test::LargeHeader& header : test::large_headers()) {
    {
      std::ofstream out(path, std::ios::binary);
      test::write_large_header(header, bytes, out);
    }
    double best = 1e9;
    for (int i = 0; i < kRepeats; ++i) {
      const auto begin = Clock::now();
      const auto file = SafetensorsFile::open(path.string(), FileAccess::kCopy);
      best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
      wrong += (file.ok() ? StatusCode::kOk : file.status().code()) == header.want ? 0 : 1;
    }
    fmt::print("{:<24} {:6.3f} s {:7.1f} MB/s\n", header.name, best,
               static_cast<double>(bytes) / best * 1e-6);
  }
  std::filesystem::remove(path);
  return wrong == 0 ? 0 : 1;
}
