// How many threads a call gets. A team costs more than its start: the call ends when its slowest
// thread has run, and on a machine with other processes a thread may wait a time slice
// (milliseconds) before it runs at all. So a stage whose call is a matter of microseconds runs on
// the caller's thread. Bits do not depend on it. Pure functions of the work; no clock.
#pragma once

namespace moesaic::cpu {

// Below this many microseconds of work for one thread there is no team. Two threads save half of it
// at best; one wait for a time slice (4 ms and more; 46 ms were seen for a layer of 3 MB) undoes 80
// such savings. One thread or all, nothing in between: OpenMP runtimes end and make threads when
// teams of different sizes follow one another.
inline constexpr double kTeamMinUs = 100;

// What one thread needs at least to read that many bytes of weights, once, and to do that many
// multiply-adds of a GEMM: 40 GB/s (measured: 38 to 43, of memory) and 50 G/s (measured: 18 without
// FMA to 230 with bf16 dot products). Deliberately one estimate for all processors: the number of
// threads does not depend on what else happens to run.
constexpr double one_thread_us(double bytes, double multiply_adds) {
  const double read = bytes / 40e3, multiply = multiply_adds / 50e3;
  return read > multiply ? read : multiply;
}

// 1 or num_threads.
int team_size(double work_us, int num_threads);

// For tests of threads: while one exists, every call uses all threads that it may use.
class ScopedTeams {
 public:
  ScopedTeams();
  ~ScopedTeams();
  ScopedTeams(const ScopedTeams&) = delete;
  ScopedTeams& operator=(const ScopedTeams&) = delete;
};

}  // namespace moesaic::cpu
