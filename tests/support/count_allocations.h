// Linked into a test, count_allocations.cc counts every operator new of its binary, on all threads.
#pragma once

namespace moesaic::test {

// Since the start of the process.
long allocations();

}  // namespace moesaic::test
