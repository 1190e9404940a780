// Threads and CUDA do not survive fork(): objects remember how many forks this process had when they
// were made, and refuse (kDevice) to be used after another. OpenMP's pool does not notice either: a
// child of a process that had one waits forever for threads that are its parent's.
#pragma once

#include <cstdint>

namespace moesaic::python {

void watch_forks();  // once, when the module is made
std::int64_t fork_count();
void check_not_forked(std::int64_t made_at);
// For whatever is about to compute with so many threads (as Options::num_threads): refuses (kDevice)
// several of them in a child whose parent may have had OpenMP's pool.
void check_threads_after_fork(int num_threads);
// Somebody else's code may have made OpenMP's threads (PyTorch's is called before each fork).
void note_openmp_threads();

}  // namespace moesaic::python
