// Threads and CUDA do not survive fork(): objects remember how many forks this process had when they
// were made, and refuse (kDevice) to be used after another.
#pragma once

#include <cstdint>

namespace moesaic::python {

void watch_forks();  // once, when the module is made
std::int64_t fork_count();
void check_not_forked(std::int64_t made_at);

}  // namespace moesaic::python
