#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "router/sm90/routing_ops.h"

namespace moesaic::cuda {
namespace {

constexpr int kRoutingThreads = 256;

// A thread per token: it reads a slot before it writes it, so outputs may be the inputs.
__global__ void __launch_bounds__(kRoutingThreads)
    take_routing(const __grid_constant__ TakeRoutingParams p) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kRoutingThreads + threadIdx.x;
  if (t >= p.tokens) return;
  const bool padding = p.padding != nullptr && p.padding[t] != 0;
  const std::int32_t slots = p.top_k + p.num_shared;
  float zero_weight = 0;
  for (std::int32_t j = 0; j < p.top_k; ++j) {
    const std::int64_t at = t * p.top_k + j;
    std::int64_t id = 0;
    if (p.ids_dtype == DType::kI64) {
      id = static_cast<const std::int64_t*>(p.ids)[at];
    } else if (p.ids_dtype == DType::kU32) {
      id = static_cast<const std::uint32_t*>(p.ids)[at];
    } else {
      id = static_cast<const std::int32_t*>(p.ids)[at];
    }
    if (padding || id < 0 || id >= p.num_experts + p.zero_experts) id = -1;
    MOESAIC_CUDA_FAULT(cuda_layer_given_ids_shifted, if (id > 0 && id < p.num_experts) id = id - 1;)
    float weight = id < 0 ? 0.0F : p.weights[at];
    if (id >= p.num_experts) {
      zero_weight += weight;
      id = 0;
      weight = 0;
    }
    p.topk_ids[t * slots + j] = static_cast<std::int32_t>(id);
    p.topk_weights[t * slots + j] = weight;
  }
  for (std::int32_t j = 0; j < p.num_shared; ++j) {
    p.topk_ids[t * slots + p.top_k + j] = padding ? -1 : p.num_experts + j;
    p.topk_weights[t * slots + p.top_k + j] = padding ? 0.0F : 1.0F;
  }
  MOESAIC_CUDA_FAULT(cuda_layer_given_identity_weight_lost, zero_weight = 0;)
  if (p.zero_weight != nullptr) p.zero_weight[t] = zero_weight;
}

__global__ void __launch_bounds__(kRoutingThreads)
    zero_expert_rows(const __grid_constant__ ZeroExpertRowsParams p) {
  const std::int64_t count = p.tokens * p.hidden;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kRoutingThreads + threadIdx.x;
       i < count; i += static_cast<std::int64_t>(gridDim.x) * kRoutingThreads) {
    const std::int64_t t = i / p.hidden;
    // 0 * NaN is not what a row of padding gets.
    const bool padding = p.padding != nullptr && p.padding[t] != 0;
    const float v = padding ? 0.0F : __fmul_rn(p.weight[t], load_element(p.x, p.x_dtype, i));
    store_element(p.output, p.output_dtype, i, v);
  }
}

}  // namespace

int launch_take_routing(const TakeRoutingParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.tokens == 0) return 0;
  const auto blocks = static_cast<unsigned>((p.tokens + kRoutingThreads - 1) / kRoutingThreads);
  return launch_kernel(take_routing, blocks, kRoutingThreads, 0, stream, p);
}

int launch_zero_expert_rows(const ZeroExpertRowsParams& p, void* stream) {
  const std::int64_t count = p.tokens * p.hidden;
  if (count == 0) return 0;
  return launch_kernel(zero_expert_rows, looping_blocks(count, kRoutingThreads), kRoutingThreads, 0,
                       stream, p);
}

}  // namespace moesaic::cuda
