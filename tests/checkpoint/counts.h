// Linked into a test, counts.cc counts what the code under test does. One thread only.
#pragma once

#include <cstdint>

namespace moesaic::test {

struct Counts {
  std::uint64_t steps = 0;  // basic blocks of files compiled with -fsanitize-coverage=trace-pc
  std::uint64_t allocations = 0;      // calls of operator new
  std::uint64_t allocated_bytes = 0;  // that they requested, freed or not
  std::uint64_t read_bytes = 0;       // by pread
};
Counts& counts();

}  // namespace moesaic::test
