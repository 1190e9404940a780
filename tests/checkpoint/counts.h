// Linked into a test, counts.cc counts what the code under test does; one thread only. What it
// allocates: count_allocations.h.
#pragma once

#include <cstdint>

namespace moesaic::test {

struct Counts {
  std::uint64_t steps = 0;       // basic blocks of files compiled with -fsanitize-coverage=trace-pc
  std::uint64_t read_bytes = 0;  // by pread
};
Counts& counts();

}  // namespace moesaic::test
