#include "core/available_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <string>

#include "core/fault.h"

namespace moesaic {
namespace {

constexpr std::int64_t kLeastChecked = std::int64_t{1} << 30;

std::optional<std::int64_t> number_at(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() || value < 0) return std::nullopt;
  return value;
}

// The number behind `key` at the beginning of a line.
std::optional<std::int64_t> number_of(std::string_view text, std::string_view key) {
  for (std::size_t at = text.find(key); at != std::string_view::npos; at = text.find(key, at + 1)) {
    if (at == 0 || text[at - 1] == '\n') return number_at(text.substr(at + key.size()));
  }
  return std::nullopt;
}

std::string text_of(const char* path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

std::optional<std::int64_t> available_memory(std::string_view meminfo, std::string_view group_max,
                                             std::string_view group_current,
                                             std::string_view group_stat) {
  constexpr std::int64_t kMostKib = std::int64_t{1} << 52;
  std::optional<std::int64_t> bytes;
  if (const auto there = number_of(meminfo, "MemAvailable:")) {
    const std::int64_t swap = number_of(meminfo, "SwapFree:").value_or(0);
    bytes = (std::min(*there, kMostKib) + std::min(swap, kMostKib)) * 1024;
  }
  const auto most = number_at(group_max), taken = number_at(group_current);
  if (most && taken) {  // "max" is no number
    const std::int64_t back = std::min(number_of(group_stat, "file ").value_or(0), *taken);
    const std::int64_t left = std::max<std::int64_t>(*most - (*taken - back), 0);
    bytes = std::min(bytes.value_or(left), left);
  }
  return bytes;
}

std::optional<std::int64_t> available_memory() {
  try {
    return available_memory(text_of("/proc/meminfo"), text_of("/sys/fs/cgroup/memory.max"),
                            text_of("/sys/fs/cgroup/memory.current"),
                            text_of("/sys/fs/cgroup/memory.stat"));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

Status check_available_memory(std::string_view what, std::int64_t bytes) {
  if (bytes < kLeastChecked || MOESAIC_FAULT(core_memory_is_always_there)) return {};
  const std::optional<std::int64_t> there = available_memory();
  if (!there || bytes <= *there) return {};
  return {StatusCode::kOutOfMemory,
          fmt::format("cannot allocate {} bytes for {}: {} are available", bytes, what, *there)};
}

}  // namespace moesaic
