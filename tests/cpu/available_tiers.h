// The tiers that this machine can run, and what tier avx2 is on machines without AVX-VNNI.
#pragma once

#include <vector>

#include "cpu/tiers.h"

namespace moesaic::cpu {

inline std::vector<const CpuKernels*> tiers() {
  std::vector<const CpuKernels*> list;
  for (const TierInfo& t : cpu_tiers()) {
    if (t.available) list.push_back(t.kernels);
    if (t.available && t.kernels == kernels_avx2()) list.push_back(avx2_with_byte_pairs());
  }
  return list;
}

}  // namespace moesaic::cpu
