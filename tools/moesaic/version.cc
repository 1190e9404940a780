#include "version.h"

#include <fmt/format.h>

#include <fstream>

#include "moesaic_tool_version.h"

namespace moesaic::tool {

const char* version() { return MOESAIC_TOOL_VERSION; }
const char* commit() { return MOESAIC_TOOL_COMMIT; }
std::string build_type() { return MOESAIC_TOOL_BUILD_TYPE; }

std::string compiler() {
#if defined(__clang__)
  return fmt::format("clang {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#elif defined(__GNUC__)
  return fmt::format("g++ {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#else
  return "unknown compiler";
#endif
}

std::string cpu_model_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::size_t colon = line.find(':');
    if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string version_text() {
  const std::string from = *commit() != '\0' ? fmt::format(" (commit {})", commit()) : "";
  return fmt::format("moesaic {}{}, {}, {}", version(), from, compiler(), build_type());
}

}  // namespace moesaic::tool
