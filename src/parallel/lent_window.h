// A rank's window in memory that other processes have open. It may be freed when nobody has it open
// any more: so behind the window lies a word of every rank, set when that rank has closed it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic::parallel {

struct LentWindow {
  int device = 0, rank = 0, ranks = 1;
  void (*free)(void* data) = nullptr;
  std::byte* data = nullptr;
  std::int64_t words = 0;  // where they begin

  // Sets `words` for a window of that size; returns the bytes of memory that it needs. CUDA's handles
  // are of whole allocations, of which small ones share one, and NCCL maps whole pages: both 2 MiB.
  std::int64_t lay_out(std::int64_t bytes);
  // To another rank, whose window this one sees at `there` and does not use any more.
  void tell_closed(std::byte* there) const;
  // Frees the memory if all have closed it.
  bool free_if_closed() const;
};

// Waits half a second for the others. What they have open then stays, for a later call of
// free_left_behind or the end of the process.
void let_go(const LentWindow& window);
// What was let go of and is closed by now.
void free_left_behind();

}  // namespace moesaic::parallel
