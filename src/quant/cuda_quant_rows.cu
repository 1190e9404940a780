#include <cuda_runtime.h>

#include <algorithm>

#include "quant/cuda_fp8.cuh"
#include "quant/cuda_quant_rows.h"

namespace moesaic::cuda {
namespace {

// Sixteen threads of eight values per group of 128.
__global__ void __launch_bounds__(256) quant_rows(const __grid_constant__ QuantRowsParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const std::int64_t groups = (p.columns + 127) / 128;
  const std::int64_t total = p.tokens * groups;
  const int part = static_cast<int>(threadIdx.x) & 15;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * 16;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * 16 + (threadIdx.x >> 4);
  // Both halves of a warp leave the loop together: an odd last group has an idle partner.
  for (std::int64_t i = first; (i & ~std::int64_t{1}) < total; i += step) {
    const std::int64_t m = i / groups, g = i - m * groups;
    const std::int64_t column = g * 128 + part * 8;
    const bool inside = i < total && column < p.columns;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside) v = *reinterpret_cast<const uint4*>(p.x + m * p.columns + column);
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
    float f[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      f[2 * j] = bf16_low(words[j]);
      f[2 * j + 1] = bf16_high(words[j]);
    }
    if (p.weights != nullptr && inside) {
      const float w = round_bf16(p.weights[m]);
#pragma unroll
      for (float& e : f) e = round_bf16(e * w);
    }
    if (!p.fp8) {
      if (inside) {
        *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.q) + m * p.columns + column) =
            make_uint4(ptx::bf16x2(f[0], f[1]), ptx::bf16x2(f[2], f[3]), ptx::bf16x2(f[4], f[5]),
                       ptx::bf16x2(f[6], f[7]));
      }
      continue;
    }
    float amax = 0.0F;
#pragma unroll
    for (const float e : f) amax = fmaxf(amax, fabsf(e));
#pragma unroll
    for (int d = 1; d < 16; d <<= 1) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, d));
    const float s = fp8_scale(amax, p.power_of_two_scales), r = 1.0F / s;
    if (inside) {
      std::uint32_t code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        code[j] = ptx::e4m3x2(divide(f[2 * j], s, r), divide(f[2 * j + 1], s, r));
      }
      *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.q) + m * p.columns + column) =
          make_uint2(code[0] | code[1] << 16, code[2] | code[3] << 16);
    }
    if (i < total && part == 0) p.scale[g * p.scale_stride + m] = s;
  }
}

}  // namespace

int launch_quant_rows(const QuantRowsParams& params, void* stream) {
  const std::int64_t groups = params.tokens * ((params.columns + 127) / 128);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(std::clamp<std::int64_t>((groups + 15) / 16, 1, 132 * 16)));
  config.blockDim = dim3(256);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, quant_rows, params));
}

}  // namespace moesaic::cuda
