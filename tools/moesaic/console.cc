#include "console.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <utility>

#include "checkpoint/container/names.h"

namespace moesaic::tool {
namespace {

thread_local int log_rank = -1;

}  // namespace

void set_log_rank(int rank) { log_rank = rank; }
std::string log_name() {
  return log_rank < 0 ? "moesaic" : fmt::format("moesaic[rank {}]", log_rank);
}

void Console::emit(const Json& object) const {
  if (!json_ || !results_) return;
  // Names inside files need not be UTF-8; replace bad bytes instead of failing on output. ASCII:
  // a terminal acts on some characters that JSON may hold as they are.
  const std::string text = object.dump(-1, ' ', true, Json::error_handler_t::replace) + "\n";
  std::fwrite(text.data(), 1, text.size(), out_);
  std::fflush(out_);  // whoever reads along sees it now, and an interruption takes none of it
}

void Console::print(std::string_view text) const {
  if (json_ || !results_) return;
  const std::string safe = checkpoint::escape_controls(text, /*keep_newlines=*/true);
  std::fwrite(safe.data(), 1, safe.size(), out_);
  std::fflush(out_);
}

void Console::note(int level, std::string_view text) const {
  if (verbosity_ < level) return;
  std::fputs(fmt::format("{}: {}\n", log_name(), checkpoint::escape_controls(text, true)).c_str(),
             stderr);
}

void Console::warn(std::string_view text) const {
  std::fputs(
      fmt::format("{}: warning: {}\n", log_name(), checkpoint::escape_controls(text, true)).c_str(),
      stderr);
}

int Console::fail(const Status& status, Origin origin, std::string_view next, Json report) const {
  if (next.empty()) next = next_step(status.code(), origin);
  return report_failure(status, exit_code(status.code(), origin), next, std::move(report));
}

int Console::fail_interrupted(const Status& status, int signal) const {
  return report_failure(status, kExitInterrupted + signal, "run the command again", Json::object());
}

int Console::report_failure(const Status& status, int code, std::string_view next,
                            Json report) const {
  std::fputs(fmt::format("{}: error: {}\n  next: {}\n", log_name(),
                         checkpoint::escape_controls(status.to_string()),
                         checkpoint::escape_controls(next))
                 .c_str(),
             stderr);
  report["error"] = status_code_name(status.code());
  report["message"] = status.message();
  report["next"] = std::string(next);
  report["exit_code"] = code;
  emit(report);
  return code;
}

ProgressFn Console::progress(std::string label) const {
  if (isatty(STDERR_FILENO) == 0) return {};
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  auto last = std::make_shared<Clock::time_point>(start);
  return [start, last, label = std::move(label)](std::int64_t done, std::int64_t total) {
    const auto now = Clock::now();
    if (now - start < std::chrono::milliseconds(500)) return;
    if (now - *last < std::chrono::milliseconds(100)) return;
    *last = now;
    const double percent =
        total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100.0;
    std::fputs(fmt::format("\r\x1b[K{}  {:.0f} %  {} of {}", label, percent, format_bytes(done),
                           format_bytes(total))
                   .c_str(),
               stderr);
  };
}

void Console::finish_progress() const {
  if (isatty(STDERR_FILENO) != 0) std::fputs("\r\x1b[K", stderr);
}

double finite(double value) {
  return std::isfinite(value) ? value : std::numeric_limits<double>::max();
}

std::string format_bytes(std::int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  // 999.5 would print as "1e+03" with three digits.
  while (value >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.3g} {}", value, kUnits[unit]);
}

std::string format_us(double us) {
  if (us >= 1e6) return fmt::format("{:.3g} s", us / 1e6);
  if (us >= 1e3) return fmt::format("{:.3g} ms", us / 1e3);
  return fmt::format("{:.3g} us", us);
}

}  // namespace moesaic::tool
