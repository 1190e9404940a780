// Device code of sum_epilogue.h.
#pragma once

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sum_epilogue.h"

namespace moesaic::cuda {

// One element; shared_value and x are those of its place, read where there are some.
__device__ __forceinline__ float epilogue_value(const SumEpilogue& e, float sum, float shared_value,
                                                float zero_weight, float x) {
  // Rounded separately, as on the CPU.
  float v = __fmul_rn(e.scale, sum);
  MOESAIC_CUDA_FAULT(cuda_layer_scale_missing, v = sum;)
  if (e.shared != nullptr) v = __fadd_rn(v, shared_value);
  if (e.zero_weight != nullptr) v = __fadd_rn(v, __fmul_rn(zero_weight, x));
  MOESAIC_CUDA_FAULT(cuda_layer_zero_expert_missing, if (e.zero_weight != nullptr) v = sum;)
  return v;
}

// Element i of row `row`.
__device__ __forceinline__ void finish_element(const SumEpilogue& e, std::int64_t row,
                                               std::int64_t i, float sum) {
  const float shared = e.shared != nullptr ? load_element(e.shared, e.shared_dtype, i) : 0.0F;
  const bool zero = e.zero_weight != nullptr;
  const float v = epilogue_value(e, sum, shared, zero ? e.zero_weight[row] : 0.0F,
                                 zero ? load_element(e.x, e.x_dtype, i) : 0.0F);
  if (e.output_f32) {
    static_cast<float*>(e.output)[i] = v;
  } else {
    static_cast<std::uint16_t*>(e.output)[i] = bf16_code(v);
  }
}

// Four of them from i on, a multiple of 4; arrays are 16-byte aligned.
__device__ __forceinline__ void load_four(const void* p, DType dtype, std::int64_t i,
                                          float (&f)[4]) {
  if (dtype == DType::kF32) {
    const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(p) + i);
    f[0] = v.x, f[1] = v.y, f[2] = v.z, f[3] = v.w;
  } else if (dtype == DType::kBF16) {
    const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(p) + i);
    f[0] = __uint_as_float(v.x << 16), f[1] = __uint_as_float(v.x & 0xFFFF0000U);
    f[2] = __uint_as_float(v.y << 16), f[3] = __uint_as_float(v.y & 0xFFFF0000U);
  } else {
    for (int j = 0; j < 4; ++j) f[j] = load_element(p, dtype, i + j);
  }
}
__device__ __forceinline__ void finish_four(const SumEpilogue& e, std::int64_t row, std::int64_t i,
                                            const float (&sum)[4]) {
  float shared[4] = {}, x[4] = {}, v[4];
  float weight = 0.0F;
  if (e.shared != nullptr) load_four(e.shared, e.shared_dtype, i, shared);
  if (e.zero_weight != nullptr) {
    load_four(e.x, e.x_dtype, i, x);
    weight = e.zero_weight[row];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = epilogue_value(e, sum[j], shared[j], weight, x[j]);
  if (e.output_f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(e.output) + i) =
        make_float4(v[0], v[1], v[2], v[3]);
  } else {
    *reinterpret_cast<uint2*>(static_cast<std::uint16_t*>(e.output) + i) =
        make_uint2(ptx::bf16x2(v[0], v[1]), ptx::bf16x2(v[2], v[3]));
  }
}

}  // namespace moesaic::cuda
