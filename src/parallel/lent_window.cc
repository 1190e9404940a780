#include "parallel/lent_window.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "core/checked.h"
#include "cuda/device_memory.h"

namespace moesaic::parallel {
namespace {

constexpr std::int64_t kWord = sizeof(std::uint32_t);
constexpr std::int64_t kOwnAllocation = std::int64_t{2} << 20;
// How long a rank that lets go waits for the others to do so too.
constexpr auto kPatience = std::chrono::milliseconds(500);

// What was let go of while others had it open.
class LeftBehind {
 public:
  void add(const LentWindow& window) {
    const std::lock_guard lock(mutex_);
    windows_.push_back(window);
  }
  void free_closed() {
    const std::lock_guard lock(mutex_);
    std::erase_if(windows_, [](const LentWindow& w) { return w.free_if_closed(); });
  }

 private:
  std::mutex mutex_;
  std::vector<LentWindow> windows_;
};
// Never destroyed: at the end of the process CUDA may be gone before it.
LeftBehind& left_behind() {
  static auto* const all = new LeftBehind();
  return *all;
}

}  // namespace

std::int64_t LentWindow::lay_out(std::int64_t bytes) {
  words = round_up(bytes, std::int64_t{256});
  return round_up(words + ranks * kWord, kOwnAllocation);
}

void LentWindow::tell_closed(std::byte* there) const {
  const std::uint32_t closed = 1;
  static_cast<void>(
      cuda::copy_to_device("peer windows", there + words + rank * kWord, &closed, kWord));
}

bool LentWindow::free_if_closed() const {
  std::vector<std::uint32_t> closed(static_cast<std::size_t>(ranks));
  const cuda::DeviceScope scope(device);
  const Status read =
      cuda::copy_to_host("peer windows", closed.data(), data + words, ranks * kWord);
  closed[static_cast<std::size_t>(rank)] = 1;
  if (!read.ok() || std::count(closed.begin(), closed.end(), 0U) > 0) return false;
  free(data);
  return true;
}

void let_go(const LentWindow& window) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!window.free_if_closed()) {
    if (std::chrono::steady_clock::now() > end) {
      left_behind().add(window);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void free_left_behind() { left_behind().free_closed(); }

}  // namespace moesaic::parallel
