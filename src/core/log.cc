#include "moesaic/log.h"

#include <mutex>
#include <unordered_set>

namespace moesaic {
namespace {

// Bounds memory when a hostile file produces many distinct texts.
constexpr std::size_t kMaxRemembered = 4096;

struct State {
  std::mutex mutex;
  LogSink sink;
  std::unordered_set<std::string> seen;
};

State& state() {
  static State s;
  return s;
}

}  // namespace

void set_log_sink(LogSink sink) {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.sink = std::move(sink);
  s.seen.clear();
}

void log_warning_once(const std::string& message) {
  State& s = state();
  LogSink sink;
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (!s.sink || s.seen.size() >= kMaxRemembered || !s.seen.insert(message).second) return;
    sink = s.sink;
  }
  try {
    sink(message);
  } catch (...) {  // nothing crosses our API, and the work that warned goes on
  }
}

}  // namespace moesaic
