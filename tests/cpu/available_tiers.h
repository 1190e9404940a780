// The tiers that this machine can run.
#pragma once

#include <vector>

#include "cpu/tiers.h"

namespace moesaic::cpu {

inline std::vector<const CpuKernels*> tiers() {
  std::vector<const CpuKernels*> list;
  for (const TierInfo& t : cpu_tiers()) {
    if (t.available) list.push_back(t.kernels);
  }
  return list;
}

}  // namespace moesaic::cpu
