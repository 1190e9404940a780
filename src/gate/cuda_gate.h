// The gate on the device: router logits [M, E] in fp32 from hidden states and the gate's weight.
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

struct GateParams {
  const void* x = nullptr;       // [tokens, hidden] of x_dtype, contiguous, 16-byte aligned
  DType x_dtype = DType::kBF16;  // BF16, F16 or F32
  const void* weight = nullptr;  // [experts, hidden] bf16 or f32, contiguous, 16-byte aligned
  bool weight_f32 = false;
  const float* bias = nullptr;  // [experts] or null
  std::int64_t tokens = 0;
  std::int32_t experts = 0;
  std::int32_t hidden = 0;  // any; rows that are not multiples of 16 bytes are read singly
  float* logits = nullptr;  // [tokens, experts], overlaps nothing
};

// bf16 rows and weights with hidden a multiple of 8 take the tensor cores (launch_gate_mma),
// everything else one warp per logit: lane l adds the products of elements 8 (l + 32 i) .. + 7 in
// ascending order with fused multiply-adds, then the lanes are added by halving distances. Either
// way the bits of a logit depend on its two rows alone, not on tokens, neighbours or launch. Error:
// <= (hidden / 32 + 64) * 2^-24 * sum|x w|. Any shape is correct. Capturable. Returns a cudaError_t
// value.
int launch_gate(const GateParams& params, void* stream);

// The two behind it (cuda_gate_mma.cu).
bool gate_fits_tensor_cores(const GateParams& params);
int launch_gate_mma(const GateParams& params, void* stream);

}  // namespace moesaic::cuda
