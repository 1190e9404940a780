#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "layer/sm90/layer_ops.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float load(const void* p, DType dtype, std::int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(p)[i];
  const std::uint16_t code = static_cast<const std::uint16_t*>(p)[i];
  if (dtype == DType::kBF16) return __uint_as_float(static_cast<std::uint32_t>(code) << 16);
  float v = 0;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(code));
  return v;
}
__device__ __forceinline__ std::uint16_t bf16(float v) {
  std::uint16_t r = 0;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

__global__ void __launch_bounds__(kThreads)
    round_to_bf16(const void* from, DType dtype, std::int64_t count, std::uint16_t* to) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    to[i] = bf16(load(from, dtype, i));
  }
}

__global__ void __launch_bounds__(kThreads)
    widen_to_f32(const void* from, DType dtype, std::int64_t count, float* to) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    to[i] = load(from, dtype, i);
  }
}

// A thread per token: it reads a slot before it writes it, so outputs may be the inputs.
__global__ void __launch_bounds__(kThreads)
    take_routing(const __grid_constant__ TakeRoutingParams p) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
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

__global__ void __launch_bounds__(kThreads)
    clear_rows(const std::uint8_t* mask, std::int64_t rows, std::int64_t words, std::uint32_t* to) {
  const std::int64_t count = rows * words;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    bool clear = mask[i / words] != 0;
    MOESAIC_CUDA_FAULT(cuda_layer_padding_stays, clear = false;)
    if (clear) to[i] = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    combine_layer(const __grid_constant__ LayerCombineParams p) {
  const std::int64_t count = p.tokens * p.hidden;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    // Rounded separately, as on the CPU.
    float sum = __fmul_rn(p.scale, p.routed[i]);
    MOESAIC_CUDA_FAULT(cuda_layer_scale_missing, sum = p.routed[i];)
    if (p.shared != nullptr) sum = __fadd_rn(sum, load(p.shared, DType::kBF16, i));
    if (p.zero_weight != nullptr) {
      sum = __fadd_rn(sum, __fmul_rn(p.zero_weight[i / p.hidden], load(p.x, p.x_dtype, i)));
    }
    MOESAIC_CUDA_FAULT(cuda_layer_zero_expert_missing,
                       if (p.zero_weight != nullptr) sum = p.routed[i];)
    if (p.output_f32) {
      static_cast<float*>(p.output)[i] = sum;
    } else {
      static_cast<std::uint16_t*>(p.output)[i] = bf16(sum);
    }
  }
}

unsigned blocks_for(std::int64_t count) {
  const std::int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 65536 ? blocks : 65536);
}

}  // namespace

int launch_round_to_bf16(const void* from, DType dtype, std::int64_t count, std::uint16_t* to,
                         void* stream) {
  if (count == 0) return 0;
  round_to_bf16<<<blocks_for(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(from, dtype,
                                                                                       count, to);
  return static_cast<int>(cudaGetLastError());
}

int launch_widen_to_f32(const void* from, DType dtype, std::int64_t count, float* to,
                        void* stream) {
  if (count == 0) return 0;
  widen_to_f32<<<blocks_for(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(from, dtype,
                                                                                      count, to);
  return static_cast<int>(cudaGetLastError());
}

int launch_take_routing(const TakeRoutingParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.tokens == 0) return 0;
  const auto blocks = static_cast<unsigned>((p.tokens + kThreads - 1) / kThreads);
  take_routing<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return static_cast<int>(cudaGetLastError());
}

int launch_clear_rows(const std::uint8_t* mask, std::int64_t rows, std::int64_t row_bytes, void* to,
                      void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (rows == 0) return 0;
  clear_rows<<<blocks_for(rows * row_bytes / 4), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      mask, rows, row_bytes / 4, static_cast<std::uint32_t*>(to));
  return static_cast<int>(cudaGetLastError());
}

int launch_layer_combine(const LayerCombineParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.tokens == 0) return 0;
  combine_layer<<<blocks_for(p.tokens * p.hidden), kThreads, 0,
                  static_cast<cudaStream_t>(stream)>>>(p);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace moesaic::cuda
