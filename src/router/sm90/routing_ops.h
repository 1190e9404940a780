// Kernels beside the router's: what a caller chose by itself in the form that a router leaves, and
// what identity experts add.
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

// The caller's ids and weights in the form that a router leaves. Ids that are not in
// [0, num_experts + zero_experts), rows of padding and their weights become -1 and 0; ids of zero
// experts become 0 with weight 0, their weights the row's zero_weight (added in slot order). Then
// come num_shared constant slots, id num_experts + i with weight 1, but for padding. Outputs may be
// the inputs where ids are 32 bits wide and num_shared is 0. Capturable. Returns a cudaError_t value.
struct TakeRoutingParams {
  const float* weights = nullptr;  // [tokens, top_k]
  const void* ids = nullptr;       // [tokens, top_k] I32, I64 or U32
  DType ids_dtype = DType::kI32;
  const std::uint8_t* padding = nullptr;  // [tokens] or null
  std::int64_t tokens = 0;
  std::int32_t top_k = 0, num_shared = 0, num_experts = 0, zero_experts = 0;
  float* topk_weights = nullptr;  // [tokens, top_k + num_shared]
  std::int32_t* topk_ids = nullptr;
  float* zero_weight = nullptr;  // [tokens], with zero experts
};
int launch_take_routing(const TakeRoutingParams& params, void* stream);

// output = weight * x per row, in fp32, rounded once; zeros in rows of padding. Capturable.
struct ZeroExpertRowsParams {
  const float* weight = nullptr;          // [tokens]
  const std::uint8_t* padding = nullptr;  // [tokens] or null
  const void* x = nullptr;                // [tokens, hidden] of x_dtype
  DType x_dtype = DType::kBF16;
  std::int64_t tokens = 0, hidden = 0;
  void* output = nullptr;  // [tokens, hidden] F32, BF16 or F16
  DType output_dtype = DType::kF32;
};
int launch_zero_expert_rows(const ZeroExpertRowsParams& params, void* stream);

}  // namespace moesaic::cuda
