// Elementwise kernels of the layer that no stage owns.
#pragma once

#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

// [count] F32 or F16 rounded to bf16 (nearest even). Capturable. Returns a cudaError_t value.
int launch_round_to_bf16(const void* from, DType dtype, std::int64_t count, std::uint16_t* to,
                         void* stream);

// [count] F32, BF16 or F16 widened, exactly. Capturable.
int launch_widen_to_f32(const void* from, DType dtype, std::int64_t count, float* to, void* stream);

// The caller's ids and weights in the form that a router leaves. Ids that are not in
// [0, num_experts + zero_experts), rows of padding and their weights become -1 and 0; ids of zero
// experts become 0 with weight 0, their weights the row's zero_weight (added in slot order). Then
// come num_shared constant slots, id num_experts + i with weight 1, but for padding. Outputs may be
// the inputs where ids are 32 bits wide and num_shared is 0.
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

// Zeros in the rows [row_bytes] whose mask is not zero; row_bytes is a multiple of 4.
int launch_clear_rows(const std::uint8_t* mask, std::int64_t rows, std::int64_t row_bytes, void* to,
                      void* stream);

// output = scale * routed + shared + zero_weight * x, in fp32 in this order, rounded once.
struct LayerCombineParams {
  const float* routed = nullptr;          // [tokens, hidden], may be `output`
  const std::uint16_t* shared = nullptr;  // [tokens, hidden] bf16, or null
  const float* zero_weight = nullptr;     // [tokens], or null
  const void* x = nullptr;                // [tokens, hidden] of x_dtype, read with zero_weight
  DType x_dtype = DType::kBF16;
  float scale = 1.0F;
  std::int64_t tokens = 0, hidden = 0;
  void* output = nullptr;  // [tokens, hidden] F32 or BF16
  bool output_f32 = true;
};
int launch_layer_combine(const LayerCombineParams& params, void* stream);

}  // namespace moesaic::cuda
