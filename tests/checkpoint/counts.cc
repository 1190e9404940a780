#include "checkpoint/counts.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

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

// Every form without an alignment, so that none is paired with the library's own.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++moesaic::test::counts().allocations;
  moesaic::test::counts().allocated_bytes += size;
  return std::malloc(size == 0 ? 1 : size);
}
void* operator new(std::size_t size) {
  if (void* p = operator new(size, std::nothrow)) return p;
  throw std::bad_alloc();
}
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new[](std::size_t size, const std::nothrow_t& tag) noexcept {
  return operator new(size, tag);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { std::free(p); }
