// Linked into a test, count_allocations.cc counts every operator new of its binary, on all threads,
// and lets one fail.
#pragma once

namespace moesaic::test {

// Since the start of the process: calls, and the bytes they asked for, freed or not.
long allocations();
long allocated_bytes();

// Of this thread the next allocation but `others` fails, and no other; -1: none does.
void fail_allocation(long others);
// Whether it has, since then.
bool allocation_failed();

}  // namespace moesaic::test
