// The gate on tensor cores for many tokens: a pipeline of tiles (cuda_gate_mma.cuh has the
// arithmetic).
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "cuda/once_per_device.h"
#include "gate/cuda_gate_mma.cuh"

namespace moesaic::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kChunk = 64;         // elements of K per stage: rows of 128 bytes
constexpr int kStepsOfChunk = 4;   // of 16 elements

// experts x tokens of a block, warps along each, stages of its ring. One block per group in a
// cluster of eight, or one block for all groups.
template <int Experts, int Tokens, int WarpsE, int WarpsT, int Stages, bool Cluster>
struct Tile {
  static constexpr int kExperts = Experts, kTokens = Tokens, kWarpsE = WarpsE;
  static constexpr int kStages = Stages;
  static constexpr bool kCluster = Cluster;
  static constexpr int kThreads = 32 * WarpsE * WarpsT;
  static constexpr int kM = Experts / WarpsE / 16, kN = Tokens / WarpsT / 8;  // fragments of a warp
  static constexpr int kStageBytes = (Experts + Tokens) * 128;
  static constexpr int kSumBytes = Cluster ? Experts * Tokens * 4 : 0;
  static constexpr int kBytes = Stages * kStageBytes > kSumBytes ? Stages * kStageBytes : kSumBytes;
  static_assert(kN % 2 == 0, "ldmatrix.x4 fetches two token fragments");
};
using SplitTile = Tile<128, 64, 4, 2, 4, true>;
using WholeTile = Tile<128, 64, 4, 2, 4, false>;

// Rows of 128 bytes whose 16-byte pieces are swizzled by the row, so that ldmatrix meets no bank
// twice.
__device__ __forceinline__ std::uint32_t piece(std::uint32_t base, int row, int column) {
  return base + static_cast<std::uint32_t>(row * 128 + ((column ^ (row & 7)) << 4));
}

// A thread's part of loading 64 elements of kRows rows: one 16-byte piece of every
// (kThreads / 8)-th row. Addresses are computed once; with few warps their arithmetic would be the kernel's time.
template <int kRows, int kThreads>
struct RowLoader {
  static constexpr int kPieces = kRows * 8 / kThreads;
  static_assert(kThreads % 64 == 0, "all rows of a thread have the same swizzle");
  const std::uint16_t* from[kPieces];
  bool real[kPieces];
  std::uint32_t to;

  // Rows `first` .. of a matrix from element k on; rows that are not there become zeros.
  __device__ RowLoader(const std::uint16_t* matrix, std::int64_t first, std::int64_t rows,
                       int hidden, int k) {
    const int row0 = static_cast<int>(threadIdx.x) / 8, column = static_cast<int>(threadIdx.x) % 8;
    to = piece(0, row0, column);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const std::int64_t row = first + row0 + i * (kThreads / 8);
      real[i] = row < rows;
      from[i] = matrix + (real[i] ? row : 0) * hidden + k + column * 8;
    }
  }
  // The next 64 elements; zeros past the end of the rows.
  __device__ __forceinline__ void load(std::uint32_t stage, bool inside) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool here = inside && real[i];
      ptx::async_load_16(stage + to + static_cast<std::uint32_t>(i * (kThreads / 8) * 128), from[i],
                         here);
      from[i] += kChunk;
    }
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads) gate_mma(const __grid_constant__ GateParams p) {
  extern __shared__ __align__(128) unsigned char raw[];
  const std::uint32_t ring = ptx::shared_address(raw);
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int rank = T::kCluster ? static_cast<int>(blockIdx.x % kGateGroups) : 0;
  const std::int64_t first_expert =
      static_cast<std::int64_t>(T::kCluster ? blockIdx.x / kGateGroups : blockIdx.x) * T::kExperts;
  const std::int64_t first_token = static_cast<std::int64_t>(blockIdx.y) * T::kTokens;
  const int my_expert = warp % T::kWarpsE * (T::kM * 16);
  const int my_token = warp / T::kWarpsE * (T::kN * 8);
  const auto* const weight = static_cast<const std::uint16_t*>(p.weight);
  const auto* const x = static_cast<const std::uint16_t*>(p.x);

  const int steps = gate_slice_steps(p.hidden);
  // Exact: four slices, four steps.
  const int group_chunks = steps * kGateSlicesOfGroup / kStepsOfChunk;
  const int chunks = group_chunks * (T::kCluster ? 1 : kGateGroups);
  const int first_chunk = rank * group_chunks;
  RowLoader<T::kExperts, T::kThreads> w_rows(weight, first_expert, p.experts, p.hidden,
                                             first_chunk * kChunk);
  RowLoader<T::kTokens, T::kThreads> x_rows(x, first_token, p.tokens, p.hidden,
                                            first_chunk * kChunk);
  // Of this thread's pieces: how far the rows reach.
  const int left_k = p.hidden - first_chunk * kChunk - static_cast<int>(threadIdx.x) % 8 * 8;
  const auto load = [&](int chunk) {
    if (chunk < chunks) {
      const std::uint32_t stage =
          ring + static_cast<std::uint32_t>(chunk % T::kStages * T::kStageBytes);
      const bool inside = chunk * kChunk < left_k;
      w_rows.load(stage, inside);
      x_rows.load(stage + T::kExperts * 128, inside);
    }
    ptx::async_commit();
  };
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) load(s);

  float part[T::kM][T::kN][4], group[T::kM][T::kN][4], total[T::kM][T::kN][4];
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int m = 0; m < T::kM; ++m) {
#pragma unroll
      for (int n = 0; n < T::kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f(part[m][n][i], group[m][n][i], total[m][n][i]);
      }
    }
  };
  each([](float& a, float& b, float& c) { a = b = c = 0; });
  // Fragments of tokens that are not there cost nothing.
  const std::int64_t left = p.tokens - first_token - my_token;
  int step = 0, slice = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    ptx::async_wait<T::kStages - 2>();
    __syncthreads();
    load(chunk + T::kStages - 1);
    const std::uint32_t w_tile =
        ring + static_cast<std::uint32_t>(chunk % T::kStages * T::kStageBytes);
    const std::uint32_t x_tile = w_tile + T::kExperts * 128;
#pragma unroll
    for (int s = 0; s < kStepsOfChunk; ++s) {
      if (left > 0) {
        std::uint32_t a[T::kM][4];
#pragma unroll
        for (int m = 0; m < T::kM; ++m) {
          load_matrices(a[m], piece(w_tile, my_expert + m * 16 + (lane & 15), 2 * s + (lane >> 4)));
        }
#pragma unroll
        for (int n = 0; n < T::kN; n += 2) {
          if (n * 8 >= left) break;
          std::uint32_t b[4];
          load_matrices(b, piece(x_tile, my_token + n * 8 + (lane >> 4) * 8 + (lane & 7),
                                 2 * s + ((lane >> 3) & 1)));
#pragma unroll
          for (int m = 0; m < T::kM; ++m) {
            multiply(part[m][n], a[m], b[0], b[1]);
            multiply(part[m][n + 1], a[m], b[2], b[3]);
          }
        }
      }
      if (++step < steps) continue;
      step = 0;
      each([](float& a, float& b, float&) {
        b = __fadd_rn(b, a);
        a = 0;
      });
      if (++slice < kGateSlicesOfGroup) continue;
      slice = 0;
      each([](float&, float& b, float& c) {
        c = __fadd_rn(c, b);
        b = 0;
      });
    }
  }

  // This thread's experts and tokens.
  const int row = my_expert + lane / 4, column = my_token + lane % 4 * 2;
  if constexpr (!T::kCluster) {
#pragma unroll
    for (int m = 0; m < T::kM; ++m) {
#pragma unroll
      for (int n = 0; n < T::kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          store_logit(p, first_expert + row + m * 16 + i / 2 * 8,
                      first_token + column + n * 8 + i % 2,
                total[m][n][i]);
        }
      }
    }
  } else {
    // The block's sums [tokens, experts] in shared memory; block r adds up all eight for its share.
    ptx::async_wait<0>();
    __syncthreads();
    auto* const sums = reinterpret_cast<float*>(raw);
#pragma unroll
    for (int m = 0; m < T::kM; ++m) {
#pragma unroll
      for (int n = 0; n < T::kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[(column + n * 8 + i % 2) * T::kExperts + row + m * 16 + i / 2 * 8] = total[m][n][i];
        }
      }
    }
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    constexpr int kShare = T::kExperts * T::kTokens / kGateGroups;
    for (int i = static_cast<int>(threadIdx.x); i < kShare; i += T::kThreads) {
      const int at = rank * kShare + i;
      float sum = 0;
#pragma unroll
      for (int g = 0; g < kGateGroups; ++g) {
        sum = __fadd_rn(sum, *cluster.map_shared_rank(sums + at, static_cast<unsigned>(g)));
      }
      store_logit(p, first_expert + at % T::kExperts, first_token + at / T::kExperts, sum);
    }
    cluster.sync();  // nobody leaves while others read its sums
  }
}

template <class T>
cudaError_t launch(const GateParams& p, void* stream) {
  static OncePerDevice once;
  const cudaError_t prepared = once([] {
    return cudaFuncSetAttribute(gate_mma<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                T::kBytes);
  });
  if (prepared != cudaSuccess) return prepared;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = kGateGroups;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  const auto blocks = static_cast<unsigned>((p.experts + T::kExperts - 1) / T::kExperts);
  config.gridDim = dim3(T::kCluster ? blocks * kGateGroups : blocks,
                        static_cast<unsigned>((p.tokens + T::kTokens - 1) / T::kTokens));
  config.blockDim = dim3(T::kThreads);
  config.dynamicSmemBytes = T::kBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = T::kCluster ? 2 : 1;
  return cudaLaunchKernelEx(&config, gate_mma<T>, p);
}

}  // namespace

int launch_gate_mma(const GateParams& p, void* stream) {
  const std::int64_t tiles = ((p.experts + 127) / 128) * ((p.tokens + 63) / 64);
  // Eight blocks per tile until the tiles alone fill the device.
  constexpr std::int64_t kEnoughTiles = 128;
  return static_cast<int>(tiles < kEnoughTiles ? launch<SplitTile>(p, stream)
                                               : launch<WholeTile>(p, stream));
}

}  // namespace moesaic::cuda
