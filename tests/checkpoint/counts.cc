#include "checkpoint/counts.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace moesaic::test {

Counts& counts() {
  static constinit Counts the_counts;
  return the_counts;
}

}  // namespace moesaic::test

extern "C" {
// Called by the compiler's instrumentation at every basic block.
void __sanitizer_cov_trace_pc();
void __sanitizer_cov_trace_pc() { ++moesaic::test::counts().steps; }

// Replaces libc's.
ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
  const ssize_t got = ::syscall(SYS_pread64, file, to, bytes, offset);
  if (got > 0) moesaic::test::counts().read_bytes += static_cast<std::uint64_t>(got);
  return got;
}
}
