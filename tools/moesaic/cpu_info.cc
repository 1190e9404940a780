#include "cpu_info.h"

#include <hwy/targets.h>

#include <fstream>

namespace moesaic::tool {

std::vector<CpuTier> available_cpu_tiers() {
  std::vector<CpuTier> tiers;
  const auto supported = static_cast<std::uint64_t>(hwy::SupportedTargets());
  for (std::uint64_t bit = 1; bit != 0; bit <<= 1) {
    if ((supported & bit) == 0) continue;
    tiers.push_back({hwy::TargetName(static_cast<std::int64_t>(bit)), true, ""});
  }
  return tiers;
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

}  // namespace moesaic::tool
