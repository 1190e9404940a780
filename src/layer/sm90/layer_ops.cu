#include <cuda_runtime.h>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "cuda/sum_epilogue.cuh"
#include "layer/sm90/layer_ops.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    round_to_bf16(const void* from, DType dtype, std::int64_t count, std::uint16_t* to) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    to[i] = bf16_code(load_element(from, dtype, i));
  }
}

__global__ void __launch_bounds__(kThreads)
    round_to_f16(const float* from, std::int64_t count, std::uint16_t* to) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    to[i] = f16_code(from[i]);
  }
}

__global__ void __launch_bounds__(kThreads)
    widen_to_f32(const void* from, DType dtype, std::int64_t count, float* to) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    to[i] = load_element(from, dtype, i);
  }
}

__global__ void __launch_bounds__(kThreads)
    clear_rows(const std::uint8_t* mask, std::int64_t rows, std::int64_t words, std::uint16_t* to) {
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
    finish_element(p, i / p.hidden, i, p.routed[i]);
  }
}

}  // namespace

int launch_round_to_bf16(const void* from, DType dtype, std::int64_t count, std::uint16_t* to,
                         void* stream) {
  if (count == 0) return 0;
  return launch_kernel(round_to_bf16, looping_blocks(count, kThreads), kThreads, 0, stream, from,
                       dtype, count, to);
}

int launch_round_to_f16(const float* from, std::int64_t count, std::uint16_t* to, void* stream) {
  if (count == 0) return 0;
  return launch_kernel(round_to_f16, looping_blocks(count, kThreads), kThreads, 0, stream, from,
                       count, to);
}

int launch_widen_to_f32(const void* from, DType dtype, std::int64_t count, float* to,
                        void* stream) {
  if (count == 0) return 0;
  return launch_kernel(widen_to_f32, looping_blocks(count, kThreads), kThreads, 0, stream, from,
                       dtype, count, to);
}

int launch_clear_rows(const std::uint8_t* mask, std::int64_t rows, std::int64_t row_bytes, void* to,
                      void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (rows == 0) return 0;
  return launch_kernel(clear_rows, looping_blocks(rows * row_bytes / 2, kThreads), kThreads, 0,
                       stream, mask, rows, row_bytes / 2, static_cast<std::uint16_t*>(to));
}

int launch_layer_combine(const LayerCombineParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.tokens == 0) return 0;
  return launch_kernel(combine_layer, looping_blocks(p.tokens * p.hidden, kThreads), kThreads, 0,
                       stream, p);
}

}  // namespace moesaic::cuda
