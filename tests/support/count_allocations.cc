#include "support/count_allocations.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
constinit std::atomic<long> count{0}, bytes{0};
constinit thread_local long left = -1;  // allocations of this thread before the one that fails
constinit thread_local bool failed = false;

bool fails_now() {
  if (left < 0 || left-- > 0) return false;
  failed = true;
  return true;
}
}  // namespace

long moesaic::test::allocations() { return count.load(); }
long moesaic::test::allocated_bytes() { return bytes.load(); }

void moesaic::test::fail_allocation(long others) {
  left = others;
  failed = false;
}
bool moesaic::test::allocation_failed() { return failed; }

// Every form without an alignment, so that none is paired with the library's own.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  count.fetch_add(1);
  bytes.fetch_add(static_cast<long>(size));
  return fails_now() ? nullptr : std::malloc(size == 0 ? 1 : size);
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
