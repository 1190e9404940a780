// Linked into a test, count_allocations.cc counts every operator new of its binary, on all threads.
#pragma once

namespace moesaic::test {

// Since the start of the process: calls, and the bytes they asked for, freed or not.
long allocations();
long allocated_bytes();

}  // namespace moesaic::test
