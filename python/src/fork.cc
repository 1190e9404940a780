#include "fork.h"

#include <pthread.h>

#include <atomic>
#include <string>

#include "core/fault.h"
#include "cpu/tiers.h"
#include "errors.h"

namespace moesaic::python {
namespace {

std::atomic<std::int64_t> g_forks{0};
// Whether this process may have OpenMP's threads; whether one that it was forked from may have had.
std::atomic<bool> g_has_pool{false}, g_lost_pool{false};

}  // namespace

void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] {
    ++g_forks;
    if (g_has_pool) g_lost_pool = true;
  });
}

std::int64_t fork_count() { return g_forks.load(std::memory_order_relaxed); }

void check_not_forked(std::int64_t made_at) {
  if (made_at == fork_count() || MOESAIC_FAULT(python_fork_not_noticed)) return;
  raise(
      StatusCode::kDevice,
      "this object was made before fork(); its threads and device memory are the parent's: use the "
      "multiprocessing start method \"spawn\", or make the object in the child (there on a CPU, "
      "and with num_threads=1 if the parent had computed)");
}

void note_openmp_threads() { g_has_pool = true; }

void check_threads_after_fork(int num_threads) {
  const int threads = cpu::resolve_threads(num_threads);
  if (threads <= 1) return;
  if (g_lost_pool && !MOESAIC_FAULT(python_lost_pool_not_noticed)) {
    raise(
        StatusCode::kDevice,
        "num_threads: got " + std::to_string(threads) +
            " in a process that was forked from one that may have computed with several threads, "
            "whose OpenMP would wait for them forever; need num_threads=1, or the multiprocessing "
            "start method \"spawn\"");
  }
  note_openmp_threads();
}

}  // namespace moesaic::python
