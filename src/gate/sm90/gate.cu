#include <cuda_runtime.h>

#include <cassert>

#include "cuda/element.cuh"
#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "gate/sm90/gate.h"

namespace moesaic::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kVector = 8;  // elements a lane reads at a time: 16 bytes of bf16

__device__ __forceinline__ float widen(std::uint16_t code) {
  return __uint_as_float(static_cast<std::uint32_t>(code) << 16);
}
__device__ __forceinline__ void read(const std::uint16_t* p, float (&v)[kVector]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000U);
  }
}
__device__ __forceinline__ void read(const float* p, float (&v)[kVector]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0];
  const float4 b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
// IEEE half, which shares its 16 bits with bf16.
struct Half {
  std::uint16_t code;
};
__device__ __forceinline__ float widen(Half h) { return f32_of_f16(h.code); }
__device__ __forceinline__ void read(const Half* p, float (&v)[kVector]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = widen(Half{static_cast<std::uint16_t>(words[i])});
    v[2 * i + 1] = widen(Half{static_cast<std::uint16_t>(words[i] >> 16)});
  }
}
__device__ __forceinline__ float one(std::uint16_t code) { return widen(code); }
__device__ __forceinline__ float one(Half h) { return widen(h); }
__device__ __forceinline__ float one(float v) { return v; }

// Adds the lanes' sums for expert e and the tokens from `first` on, and stores the logits.
template <int kRows>
__device__ __forceinline__ void store_sums(const GateParams& p, std::int64_t first, int e, int lane,
                                           float (&sum)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum[r] += __shfl_xor_sync(0xFFFFFFFFU, sum[r], distance);
    }
    if (lane == 0 && first + r < p.tokens) {
      p.logits[(first + r) * p.experts + e] = p.bias != nullptr ? sum[r] + p.bias[e] : sum[r];
    }
  }
}

// kRows tokens of kExperts experts per warp: a row is read once for all of the other kind. Absent rows
// of the last tiles repeat the last one and are not stored; every accumulator is a chain of its own,
// so the tile's size changes no bit.
template <class X, class W, int kRows, int kExperts>
__global__ void __launch_bounds__(kWarps * 32, kRows* kExperts >= 64 ? 3 : 1)
    gate(const __grid_constant__ GateParams p) {
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x >> 5);
  const int first_expert = warp * kExperts;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (first_expert >= p.experts) return;
  const std::int64_t hidden = p.hidden;
  const W* w[kExperts];
#pragma unroll
  for (int e = 0; e < kExperts; ++e) {
    w[e] = static_cast<const W*>(p.weight) + min(first_expert + e, p.experts - 1) * hidden;
  }
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * kRows; first < p.tokens;
       first += static_cast<std::int64_t>(gridDim.y) * kRows) {
    const X* const x = static_cast<const X*>(p.x) + first * hidden;
    std::uint32_t row[kRows];  // begins here: in fewer registers than pointers
    float sum[kExperts][kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t last = p.tokens - 1 - first;
      row[r] = static_cast<std::uint32_t>((r < last ? r : last) * hidden);
#pragma unroll
      for (int e = 0; e < kExperts; ++e) sum[e][r] = 0;
    }
    const bool vectors = hidden % kVector == 0;
    for (std::int64_t h = lane * kVector; h < hidden; h += 32 * kVector) {
      if (vectors) {
        float wv[kExperts][kVector];
#pragma unroll
        for (int e = 0; e < kExperts; ++e) read(w[e] + h, wv[e]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float xv[kVector];
          read(x + row[r] + h, xv);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
#pragma unroll
            for (int e = 0; e < kExperts; ++e) sum[e][r] = fmaf(xv[i], wv[e][i], sum[e][r]);
          }
        }
      } else {
        std::int64_t end = h + kVector < hidden ? h + kVector : hidden;
        MOESAIC_CUDA_FAULT(cuda_gate_last_element_missing, end = end < hidden ? end : hidden - 1;)
        for (std::int64_t i = h; i < end; ++i) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int e = 0; e < kExperts; ++e) {
              sum[e][r] = fmaf(one(x[row[r] + i]), one(w[e][i]), sum[e][r]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      if (first_expert + e < p.experts) store_sums(p, first, first_expert + e, lane, sum[e]);
    }
  }
}

// The same sums in the same order for fp32 weights with rows of 256 kVectors elements: a warp
// requests its whole row at once, before the kernel in front has ended.
template <class X, int kVectors, int kRows>
__global__ void __launch_bounds__(kWarps * 32) gate_fp32(const __grid_constant__ GateParams p) {
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int e = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x >> 5);
  const std::int64_t hidden = kVectors * 32 * kVector;
  float w[kVectors][kVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    read(static_cast<const float*>(p.weight) + e * hidden + (v * 32 + lane) * kVector, w[v]);
  }
  MOESAIC_CUDA_FAULT(cuda_gate_fp32_rows_lose_an_element, w[0][0] = 0;)
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * kRows;
  const X* x[kRows];
  float sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t t = first + r < p.tokens ? first + r : p.tokens - 1;
    x[r] = static_cast<const X*>(p.x) + t * hidden + lane * kVector;
    sum[r] = 0;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float xv[kVector];
      read(x[r] + v * 32 * kVector, xv);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[r] = fmaf(xv[i], w[v][i], sum[r]);
    }
  }
  store_sums(p, first, e, lane, sum);
}

// Rows per block; each kernel has these three heights.
int rows_of(const GateParams& p) { return p.tokens >= 8 ? 8 : p.tokens >= 4 ? 4 : 1; }

// experts: of a warp.
cudaError_t launch(void (*kernel)(GateParams), const GateParams& p, int rows, int experts,
                   void* stream) {
  const std::int64_t tiles = (p.tokens + rows - 1) / rows;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  const int of_block = kWarps * experts;
  config.gridDim = dim3(static_cast<unsigned>((p.experts + of_block - 1) / of_block),
                        static_cast<unsigned>(tiles < 65535 ? tiles : 65535));
  config.blockDim = dim3(kWarps * 32);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}
template <class X, class W>
cudaError_t launch_any(const GateParams& p, void* stream) {
  // Many logits: each read of L2 serves more of them.
  constexpr int kTileRows = 16, kTileExperts = 4;
  constexpr std::int64_t kTileLogits = 1 << 16;
  constexpr std::int32_t kLongRow = 1 << 27;  // of which 32 bits do not count several
  if (p.hidden > kLongRow) return launch(gate<X, W, 1, 1>, p, 1, 1, stream);
  if (p.tokens * p.experts >= kTileLogits && p.experts >= kTileExperts) {
    return launch(gate<X, W, kTileRows, kTileExperts>, p, kTileRows, kTileExperts, stream);
  }
  const int rows = rows_of(p);
  return launch(rows == 8   ? gate<X, W, 8, 1>
                : rows == 4 ? gate<X, W, 4, 1>
                            : gate<X, W, 1, 1>,
                p, rows, 1, stream);
}
template <class X, int kVectors>
cudaError_t launch_fp32(const GateParams& p, void* stream) {
  const int rows = rows_of(p);
  return launch(rows == 8   ? gate_fp32<X, kVectors, 8>
                : rows == 4 ? gate_fp32<X, kVectors, 4>
                            : gate_fp32<X, kVectors, 1>,
                p, rows, 1, stream);
}
template <class X>
cudaError_t launch_fp32_rows(const GateParams& p, void* stream) {
  return p.hidden == 3072 ? launch_fp32<X, 12>(p, stream) : launch_fp32<X, 24>(p, stream);
}

}  // namespace

int launch_gate(const GateParams& p, GateKernel kernel, const DeviceTraits& device, void* stream) {
  if (p.tokens == 0) return 0;
  MOESAIC_ARM_CUDA_FAULTS();
  assert(p.prologue.zero == nullptr || kernel == GateKernel::kOneWave);
  switch (kernel) {
    case GateKernel::kOneWave:
      return launch_gate_one_wave(p, stream);
    case GateKernel::kResidentWeights:
      return launch_gate_resident_weights(p, device, stream);
    case GateKernel::kTiledPipeline:
      return launch_gate_tiled_pipeline(p, device, stream);
    case GateKernel::kFp32Rows:
      return static_cast<int>(p.x_dtype == DType::kF32
                                  ? launch_fp32_rows<float>(p, stream)
                                  : launch_fp32_rows<std::uint16_t>(p, stream));
    case GateKernel::kWarpPerLogit:
      break;
  }
  const auto with_weight = [&]<class X>(X) {
    return static_cast<int>(p.weight_f32 ? launch_any<X, float>(p, stream)
                                         : launch_any<X, std::uint16_t>(p, stream));
  };
  if (p.x_dtype == DType::kF32) return with_weight(float());
  if (p.x_dtype == DType::kF16) return with_weight(Half());
  return with_weight(std::uint16_t());
}

}  // namespace moesaic::cuda
