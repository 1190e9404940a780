// What the tool says about the processor.
#pragma once

#include <string>
#include <vector>

namespace moesaic::tool {

struct CpuTier {
  std::string name;  // "avx512_bf16", ...
  bool available = false;
  std::string reason;  // why not, when unavailable
};

// The SIMD tiers compiled into the binary, fastest first.
std::vector<CpuTier> available_cpu_tiers();
// As the operating system states it; "unknown" when it does not.
std::string cpu_model_name();

}  // namespace moesaic::tool
