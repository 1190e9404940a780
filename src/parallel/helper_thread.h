// A thread for calls that may never return: who waits for it leaves it behind at a deadline.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "moesaic/status.h"

namespace moesaic::parallel {

class HelperThread {
 public:
  using Clock = std::chrono::steady_clock;

  HelperThread() = default;
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;
  ~HelperThread();  // leaves it behind, unless it was found done or joined

  // Once, with `device` as the thread's. What `work` uses is its own: it may go on when everybody
  // else has gone. kDevice: no thread.
  Status start(int device, std::function<void()> work);
  // Whether the work is done by then; its results may be read from then on.
  bool done_by(Clock::time_point deadline);
  // Waits for the work without an end.
  void join();

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace moesaic::parallel
