// What the ranks of one run under mpirun (mpi_test.py) tell each other besides MPI, through files in
// the folder that MOESAIC_TEST_REPORTS names: so that a late rank is late until the others have
// said so, and nobody leaves before all have spoken, however long either takes.
#pragma once

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "support/hang_guard.h"

namespace moesaic::test {

inline constexpr int kFaultyRank = 1;

inline std::filesystem::path note_of(int rank, const char* what) {
  const char* folder = std::getenv("MOESAIC_TEST_REPORTS");
  return std::filesystem::path(folder != nullptr ? folder : ".") / (what + std::to_string(rank));
}

inline void note(int rank, const char* what) { std::ofstream(note_of(rank, what)) << what; }

// Until all ranks of `size` have noted `what`, the faulty one only where it is `included`.
inline void wait_for(const char* what, int size, bool included) {
  constexpr int kStepMs = 10;
  for (int waited = 0; waited < kHangGuardMs; waited += kStepMs) {
    bool all = true;
    for (int r = 0; r < size; ++r) {
      all = all && ((r == kFaultyRank && !included) || std::filesystem::exists(note_of(r, what)));
    }
    if (all) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(kStepMs));
  }
}

}  // namespace moesaic::test
