#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "layer/sm90/norm_rows.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVector = 8;  // elements that a thread reads at a time

// x times 2^exponent lies around 1 for x around `root`, so that sums of its products have neither
// infinities nor subnormal numbers where those of x / root have none; times `factor` it is x / root.
struct RowScale {
  int exponent;
  float factor;
};
__device__ __forceinline__ RowScale row_scale(double root, double inverse) {
  const int exponent = isfinite(root) ? -ilogb(root) : 0;
  double factor = ldexp(inverse, -exponent);
  MOESAIC_CUDA_FAULT(cuda_layer_norm_factor_of_raw_rows, factor = inverse;)
  return {exponent, static_cast<float>(factor)};
}

// Elements i and following; of more than one, i is a multiple of kWidth and p on 16 bytes.
template <int kWidth>
__device__ __forceinline__ void load(const void* p, DType dtype, std::int64_t i,
                                     float (&v)[kWidth]) {
  if constexpr (kWidth == 1) {
    v[0] = load_element(p, dtype, i);
  } else if (dtype == DType::kF32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(p) + i);
    const float4 a = from[0], b = from[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p) + i);
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const auto code = static_cast<std::uint16_t>(words[j / 2] >> (j % 2 * 16));
      v[j] = dtype == DType::kBF16 ? __uint_as_float(static_cast<std::uint32_t>(code) << 16)
                                   : f32_of_f16(code);
    }
  }
}
template <int kWidth>
__device__ __forceinline__ void store(void* p, DType dtype, std::int64_t i,
                                      const float (&v)[kWidth]) {
  if constexpr (kWidth == 1) {
    store_element(p, dtype, i, v[0]);
  } else if (dtype == DType::kF32) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(p) + i);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    std::uint32_t words[4] = {};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const std::uint32_t code = dtype == DType::kBF16 ? bf16_code(v[j]) : f16_code(v[j]);
      words[j / 2] |= code << (j % 2 * 16);
    }
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p) + i) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Of the block's threads, in one order.
__device__ __forceinline__ double sum_of_block(double v, double (&warps)[kWarps]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    v += __shfl_xor_sync(0xFFFFFFFFU, v, distance);
  __syncthreads();  // nobody reads the sums before
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  double sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += warps[w];
  return sum;
}

// A block per row.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ NormRowsParams p) {
  __shared__ double warps[kWarps];
  constexpr std::uint32_t kStep = kThreads * kWidth;  // columns are counted in 31 bits
  const std::uint32_t begin = threadIdx.x * kWidth;
  for (std::int64_t t = blockIdx.x; t < p.tokens; t += gridDim.x) {
    const std::int64_t row = t * p.hidden;
    double squares = 0;
    for (std::uint32_t h = begin; h < p.hidden; h += kStep) {
      float x[kWidth];
      load(p.x, p.x_dtype, row + h, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) squares += double{x[j]} * double{x[j]};
    }
    const double sum = sum_of_block(squares, warps);
    double mean = sum / static_cast<double>(p.hidden);
    MOESAIC_CUDA_FAULT(cuda_layer_norm_of_the_sum, mean = sum;)
    const double root = sqrt(mean + p.eps);
    const double inverse = 1.0 / root;
    const RowScale scale = row_scale(root, inverse);
    if (p.scaled != nullptr && threadIdx.x == 0) p.factors[t] = scale.factor;
    for (std::uint32_t h = begin; h < p.hidden; h += kStep) {
      float x[kWidth], w[kWidth], out[kWidth];
      load(p.x, p.x_dtype, row + h, x);
      load(p.weight, DType::kF32, h, w);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        MOESAIC_CUDA_FAULT(cuda_layer_norm_without_weights, w[j] = 1;)
        out[j] = static_cast<float>(double{x[j]} * inverse * double{w[j]});
      }
      store(p.weighted, p.weighted_dtype, row + h, out);
      if (p.normed != nullptr) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) out[j] = static_cast<float>(double{x[j]} * inverse);
        store(p.normed, DType::kF32, row + h, out);
      }
      if (p.scaled != nullptr) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) out[j] = ldexpf(x[j], scale.exponent);
        store(p.scaled, DType::kBF16, row + h, out);
      }
    }
  }
}

}  // namespace

int launch_norm_rows(const NormRowsParams& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  if (p.tokens == 0) return 0;
  const bool vectors = p.hidden % kVector == 0 && reinterpret_cast<std::uintptr_t>(p.x) % 16 == 0;
  return launch_kernel(vectors ? norm_rows<kVector> : norm_rows<1>, looping_blocks(p.tokens, 1),
                       kThreads, 0, stream, p);
}

}  // namespace moesaic::cuda
