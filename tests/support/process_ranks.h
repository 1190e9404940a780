// Ranks that are processes: a test starts its own program again for each of them, connects them by
// sockets, and may kill them.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moesaic/communicator.h"

namespace moesaic::test {

// What a process that RankProcesses started is to do.
struct StartedRank {
  std::shared_ptr<Communicator> world;
  std::string task;
  int parent = -1;
  // To the test, which waits for it: RankProcesses::await.
  void ready() const;
};
// Nothing in other processes. For main(), before the tests.
std::optional<StartedRank> started_rank();

class RankProcesses {
 public:
  // One program for each rank, whose time-out is that of its communicator.
  RankProcesses(const std::string& task, int ranks, int timeout_ms);
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;
  ~RankProcesses();  // kills those that still run

  // Whether all have said that they are ready within that time.
  bool await_all(int seconds) const;
  void kill(int rank);
  // Exit code; -1: killed by a signal, -2: not done in time.
  int join(int rank, int seconds);

 private:
  struct Process {
    pid_t pid = -1;
    int from = -1;
  };
  std::vector<Process> processes_;
};

}  // namespace moesaic::test
