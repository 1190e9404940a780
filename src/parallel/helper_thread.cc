#include "parallel/helper_thread.h"

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <utility>

namespace moesaic::parallel {

// What the thread and its maker share; either may be the last to go.
struct HelperThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

HelperThread::~HelperThread() {
  if (thread_.joinable()) thread_.detach();
}

Status HelperThread::start(int device, std::function<void()> work) {
  state_ = std::make_shared<State>();
  try {
    thread_ = std::thread([device, state = state_, work = std::move(work)]() mutable {
      // For good: going back to the first device would make a context there. Where it fails, so
      // does the first call of the work.
      static_cast<void>(cudaSetDevice(device));
      work();
      work = nullptr;  // what it holds goes before anybody is told
      const std::lock_guard<std::mutex> lock(state->mutex);
      state->done = true;
      state->changed.notify_all();
    });
  } catch (const std::system_error& error) {
    return {StatusCode::kDevice, fmt::format("nccl: cannot start a thread: {}", error.what())};
  }
  return {};
}

bool HelperThread::done_by(Clock::time_point deadline) {
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (!state_->changed.wait_until(lock, deadline, [&] { return state_->done; })) return false;
  }
  thread_.join();
  return true;
}

void HelperThread::join() {
  if (thread_.joinable()) thread_.join();
}

}  // namespace moesaic::parallel
