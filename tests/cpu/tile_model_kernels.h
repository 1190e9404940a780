// The tier "amx" on the model of its instructions.
#pragma once

#include <vector>

#include "available_tiers.h"
#include "cpu/kernels.h"

namespace moesaic::cpu {

// Null where the processor or the build lacks what else the tier needs (avx512_bf16).
const CpuKernels* kernels_amx_model();

// The tiers that this machine can run, and that model.
inline std::vector<const CpuKernels*> tiers_and_model() {
  std::vector<const CpuKernels*> list = tiers();
  if (kernels_amx_model() != nullptr) list.push_back(kernels_amx_model());
  return list;
}

}  // namespace moesaic::cpu
