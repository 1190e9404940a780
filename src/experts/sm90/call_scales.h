// Static scales of operand rows that a call brings, as the kernels read those of the experts.
#pragma once

#include <cstdint>

#include "experts/sm90/experts.h"

namespace moesaic::cuda {

struct CallScalesParams {
  CudaCallScales given[2];  // of GEMM1's and GEMM2's rows; those without `of` are left out
  std::int64_t experts = 0;
  float* to = nullptr;  // [2, experts]; NaN for what is not finite and above 0
};
// Capturable. Returns a cudaError_t value.
int launch_call_scales(const CallScalesParams& params, void* stream);

}  // namespace moesaic::cuda
