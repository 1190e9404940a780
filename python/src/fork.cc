#include "fork.h"

#include <pthread.h>

#include <atomic>

#include "core/fault.h"
#include "errors.h"

namespace moesaic::python {
namespace {

std::atomic<std::int64_t> g_forks{0};

}  // namespace

void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { ++g_forks; });
}

std::int64_t fork_count() { return g_forks.load(std::memory_order_relaxed); }

void check_not_forked(std::int64_t made_at) {
  if (made_at == fork_count() || MOESAIC_FAULT(python_fork_not_noticed)) return;
  raise(
      StatusCode::kDevice,
      "this object was made before fork(); its threads and device memory are the parent's: use the "
      "multiprocessing start method \"spawn\", or make the object in the child");
}

}  // namespace moesaic::python
