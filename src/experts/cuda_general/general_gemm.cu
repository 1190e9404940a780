#include <cuda_runtime.h>

#include "cuda/fault.cuh"
#include "cuda/launch.cuh"
#include "experts/cuda_general/elements.cuh"
#include "experts/cuda_general/general_activation.cuh"
#include "experts/cuda_general/general_kernels.h"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHalfRows = kGeneralTileRows / 2;
constexpr int kStep = 32;  // columns in shared memory at once
static_assert(kGeneralChunk % kStep == 0);

// Weights as they lie in memory, sixteen columns of a row per thread. The dtype is the same for all
// threads of a launch: one kernel for all keeps them few.
constexpr int kOwnColumns = 16;
struct WeightColumns {
  uint4 vectors[4];

  // Zeros for a row outside (null) and behind `left` bytes, whole vectors.
  __device__ __forceinline__ void load(const std::byte* at, std::int64_t left, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      vectors[i] = make_uint4(0, 0, 0, 0);
      if (i < count && at != nullptr && i * 16 < left) {
        vectors[i] = reinterpret_cast<const uint4*>(at)[i];
      }
    }
  }
  template <int kBytes>
  __device__ __forceinline__ std::uint32_t bits(int i) const {
    constexpr int kVector = 16 / kBytes;
    const uint4& v = vectors[i / kVector];
    const int byte = i % kVector * kBytes, word = byte / 4;
    return (word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w) >> (byte % 4 * 8);
  }
  // Column by column to `to`, whose columns lie kGeneralTileRows + 4 apart.
  template <class Decode>
  __device__ __forceinline__ void store(float* to, const Decode& decode) const {
#pragma unroll
    for (int i = 0; i < kOwnColumns; ++i) to[i * (kGeneralTileRows + 4)] = decode(i);
  }
  __device__ __forceinline__ void store(DType dtype, float* to) const {
    if (dtype == DType::kBF16) {
      store(to, [&](int i) { return f32_of_bf16(static_cast<std::uint16_t>(bits<2>(i))); });
    } else if (dtype == DType::kF16) {
      store(to, [&](int i) { return f32_of_f16(static_cast<std::uint16_t>(bits<2>(i))); });
    } else if (dtype == DType::kF8E4M3) {
      store(to, [&](int i) { return f32_of_e4m3(static_cast<std::uint8_t>(bits<1>(i))); });
    } else {
      store(to, [&](int i) { return __uint_as_float(bits<4>(i)); });
    }
  }
};

// A block has kGeneralTileRows weight rows and kRows token rows. A thread has kOwn rows of either
// half of the weight rows (so that a gate is with its up) and kTokens token rows.
template <int kRows>
__global__ void __launch_bounds__(kThreads) general_gemm(const __grid_constant__ GeneralGemm p) {
  constexpr int kOwn = kRows == kFewRows ? 2 : 4, kTokens = kRows == kFewRows ? 1 : 4;
  constexpr int kAcross = kHalfRows / kOwn;  // threads beside each other along the weight rows
  static_assert(kThreads / kAcross * kTokens == kRows);
  constexpr int kWarps = kThreads / 32, kLoads = kRows / kWarps;
  __shared__ __align__(16) float w_shared[kStep][kGeneralTileRows + 4];
  __shared__ __align__(16) float x_shared[kStep][kRows + 4];
  __shared__ std::int64_t x_row[kRows];

  const auto group = static_cast<std::int32_t>(blockIdx.x);
  if (group >= static_cast<std::int32_t>(*p.num_groups)) return;
  const GroupRecord record = p.groups[group];
  const std::int32_t before = (group - record.first_group) * kRows;
  const std::int32_t live = min(kRows, record.rows - before), first = record.first_row + before;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kRows) {
    std::int64_t row = 0;
    if (thread < live) {
      row = first + thread;
      if (p.from != GeneralGemm::From::kList) row = p.pair_of_row[row];
      if (p.from == GeneralGemm::From::kToken) row /= p.top_k;
    }
    x_row[thread] = row;
  }

  const GeneralMatrix& m = p.weights;
  const std::int32_t channels = p.gated ? m.rows / 2 : m.rows;  // of the result
  // The weight row of row `i` of the tile; -1: none.
  const auto weight_row = [&](int i) {
    const int half = i / kHalfRows;
    const auto tile = static_cast<std::int32_t>(blockIdx.y);
    if (!p.gated) {
      const std::int32_t row = tile * kGeneralTileRows + i;
      return row < m.rows ? row : -1;
    }
    const std::int32_t channel = tile * kHalfRows + i % kHalfRows;
    return channel < channels ? half * channels + channel : -1;
  };
  const int load_row = thread % kGeneralTileRows;
  const int load_column = thread / kGeneralTileRows * kOwnColumns;
  const std::int32_t loaded = weight_row(load_row);
  const int element = m.dtype == DType::kF32 ? 4 : m.dtype == DType::kF8E4M3 ? 1 : 2;
  const auto* const weights =
      loaded < 0
          ? nullptr
          : static_cast<const std::byte*>(m.data) +
                (static_cast<std::int64_t>(record.expert) * m.rows + loaded) * m.stride * element;
  const int lane = thread % 32, warp = thread / 32;
  WeightColumns w_next;
  float x_next[kLoads];
  const auto load = [&](std::int32_t k) {
    const std::int64_t at = k + load_column;
    w_next.load(weights == nullptr ? nullptr : weights + at * element, (m.stride - at) * element,
                element);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = warp + i * kWarps;
      const std::int32_t column = k + lane;
      x_next[i] = 0;
      if (row < live && column < m.columns) {
        x_next[i] = operand_element(p.x, p.x_dtype, x_row[row] * m.columns + column, p.round,
                                    p.factor == nullptr ? nullptr : p.factor + first + row);
      }
    }
  };

  const int across = thread % kAcross, down = thread / kAcross;
  const auto own_row = [&](int i) {  // of the tile
    return i / kOwn * kHalfRows + across * kOwn + i % kOwn;
  };
  float part[2 * kOwn][kTokens] = {}, sum[2 * kOwn][kTokens] = {};
  const auto fold = [&](std::int32_t chunk) {
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) {
      float scale = 1;
      if (m.scale != nullptr) {
        // Rows are counted within gate and up.
        const std::int32_t row = max(weight_row(own_row(i)), 0), half = row / channels;
        const std::int64_t block =
            half * (m.scale_rows / 2) +
            (row - half * channels) / static_cast<std::int32_t>(kGeneralChunk);
        scale = m.scale[(record.expert * static_cast<std::int64_t>(m.scale_rows) + block) *
                            m.scale_columns +
                        chunk];
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float factor = scale;
        if (p.x_scale != nullptr) {
          factor *= p.x_scale[chunk * p.x_scale_stride + x_row[down * kTokens + t]];
        }
        sum[i][t] = fmaf(part[i][t], factor, sum[i][t]);
        part[i][t] = 0;
      }
    }
  };

  __syncthreads();
  load(0);
  for (std::int32_t k = 0; k < m.columns; k += kStep) {
    w_next.store(m.dtype, &w_shared[load_column][load_row]);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x_shared[lane][warp + i * kWarps] = x_next[i];
    __syncthreads();
    if (k + kStep < m.columns) load(k + kStep);
#pragma unroll 4
    for (int c = 0; c < kStep; ++c) {
      float w[2 * kOwn], x[kTokens];
#pragma unroll
      for (int i = 0; i < 2 * kOwn; ++i) w[i] = w_shared[c][own_row(i)];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) x[t] = x_shared[c][down * kTokens + t];
#pragma unroll
      for (int i = 0; i < 2 * kOwn; ++i) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) part[i][t] = fmaf(w[i], x[t], part[i][t]);
      }
    }
    __syncthreads();
    if ((k + kStep) % kGeneralChunk == 0 || k + kStep >= m.columns) {
      fold(k / static_cast<std::int32_t>(kGeneralChunk));
    }
  }

  const auto biased = [&](std::int32_t row, float v) {
    return m.bias == nullptr ? v
                             : v + m.bias[static_cast<std::int64_t>(record.expert) * m.rows + row];
  };
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int row = down * kTokens + t;
    if (row >= live) continue;
    const std::int64_t place = first + row;
    if (p.activates && p.gated) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const std::int32_t channel = weight_row(own_row(i));
        if (channel < 0) continue;
        float gate = biased(channel, sum[i][t]), up = biased(channels + channel, sum[kOwn + i][t]);
        MOESAIC_CUDA_FAULT(cuda_general_gate_and_up_swapped, const float g = gate; gate = up;
                           up = g;)
        store_element(p.out, p.out_dtype, place * channels + channel,
                      general_activate(p.activation, gate, up));
      }
      continue;
    }
    const std::int64_t to = p.activates ? place : p.pair_of_row[place];
    const float weight = p.weight == nullptr ? 1.0F : p.weight[place];
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) {
      const std::int32_t channel = weight_row(own_row(i));
      if (channel < 0) continue;
      float v = biased(channel, sum[i][t]);
      v = p.activates ? general_activate(p.activation, v, 0.0F) : __fmul_rn(weight, v);
      MOESAIC_CUDA_FAULT(cuda_general_last_channel_lost, if (channel == channels - 1) v = 0.0F;)
      store_element(p.out, p.out_dtype, to * channels + channel, v);
    }
  }
}

}  // namespace

int launch_general_gemm(const GeneralGemm& p, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  const int tile = p.gated ? kHalfRows : kGeneralTileRows;
  const int channels = p.gated ? p.weights.rows / 2 : p.weights.rows;
  const dim3 grid(static_cast<unsigned>(p.max_groups),
                  static_cast<unsigned>((channels + tile - 1) / tile));
  return launch_kernel(
      p.rows_per_record == kFewRows ? general_gemm<kFewRows> : general_gemm<kManyRows>, grid,
      kThreads, 0, stream, p);
}

}  // namespace moesaic::cuda
