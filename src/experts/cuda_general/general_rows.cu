#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "experts/cuda_general/elements.cuh"
#include "experts/cuda_general/general_kernels.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// A warp per group of 128 columns.
__global__ void __launch_bounds__(kThreads) general_quant(const __grid_constant__ GeneralQuant p) {
  constexpr int kValues = static_cast<int>(kGeneralChunk) / 32;
  const std::int64_t groups = (p.columns + kGeneralChunk - 1) / kGeneralChunk;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t rows = p.num_rows != nullptr ? *p.num_rows : p.rows;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp; i < rows * groups;
       i += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    std::int64_t row = i / groups;
    const std::int64_t group = i - row * groups;
    if (p.row_of != nullptr) row = p.row_of[row];
    float v[kValues], amax = 0;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const std::int64_t column = group * kGeneralChunk + j * 32 + lane;
      v[j] = 0;
      if (column < p.columns) {
        v[j] = operand_element(p.x, p.x_dtype, row / p.share * p.columns + column, p.round,
                               p.factor == nullptr ? nullptr : p.factor + row);
      }
      amax = fmaxf(amax, fabsf(v[j]));
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, d));
    const float scale = fp8_scale(amax, p.power_of_two_scales);
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const std::int64_t column = group * kGeneralChunk + j * 32 + lane;
      if (column >= p.columns) continue;
      p.codes[row * p.columns + column] =
          static_cast<std::uint8_t>(ptx::e4m3x2(__fdiv_rn(v[j], scale), 0.0F) & 0xFFU);
    }
    if (lane == 0) p.scale[group * p.scale_stride + row] = scale;
  }
}

__global__ void __launch_bounds__(kThreads)
    general_combine(const __grid_constant__ GeneralCombine p) {
  const std::int64_t count = p.tokens * p.hidden;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const std::int64_t token = i / p.hidden, channel = i - token * p.hidden;
    float sum = 0;
    for (std::int32_t j = 0; j < p.top_k; ++j) {
      const std::int64_t pair = token * p.top_k + j;
      if (p.row_of_pair[pair] < 0) continue;
      sum = __fadd_rn(sum, p.y[pair * p.hidden + channel]);
    }
    MOESAIC_CUDA_FAULT(cuda_general_combine_keeps_the_first,
                       sum = p.y[token * p.top_k * p.hidden + channel];)
    if (p.shared != nullptr) sum = __fadd_rn(sum, f32_of_bf16(p.shared[i]));
    store_element(p.output, p.dtype, i, sum);
  }
}

}  // namespace

int launch_general_quant(const GeneralQuant& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const std::int64_t groups = p.rows * ((p.columns + kGeneralChunk - 1) / kGeneralChunk);
  if (groups == 0) return 0;
  return launch_kernel(general_quant, looping_blocks(groups, kWarps), kThreads, 0, stream, p);
}

int launch_general_combine(const GeneralCombine& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const std::int64_t count = p.tokens * p.hidden;
  if (count == 0) return 0;
  return launch_kernel(general_combine, looping_blocks(count, kThreads), kThreads, 0, stream, p);
}

}  // namespace moesaic::cuda
