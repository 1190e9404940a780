// The gate on tensor cores, for bf16 rows and weights.
//
// K is cut into 32 slices of whole 16-element steps, the last ones padded with zeros. A slice is a
// chain of m16n8k16 multiplies into one fp32 accumulator, ascending. Four neighbouring slices are
// added in order, then the eight sums of four, in order, then the bias. So a logit's bits depend on
// its two rows alone, whatever tile, cluster or launch computed it.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "cuda/ptx/sync.cuh"
#include "gate/cuda_gate.h"

namespace moesaic::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kGroups = 8, kSlicesOfGroup = 4;
constexpr int kChunk = 64;         // elements of K per stage: rows of 128 bytes
constexpr int kStepsOfChunk = 4;   // of 16 elements

// Steps of 16 elements in a slice.
__host__ __device__ inline int slice_steps(int hidden) {
  constexpr int kSlices = kGroups * kSlicesOfGroup;
  return ((hidden + 15) / 16 + kSlices - 1) / kSlices;
}

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
using SmallTile = Tile<32, 16, 2, 1, 8, true>;
using SplitTile = Tile<128, 64, 4, 2, 4, true>;
using WholeTile = Tile<128, 64, 4, 2, 4, false>;

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
// 16 bytes, or zeros (then nothing is read).
__device__ __forceinline__ void copy16(std::uint32_t to, const void* from, bool real) {
  const int bytes = real ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// d [16 experts, 8 tokens] += a [16 experts, 16 k] * b [16 k, 8 tokens].
__device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rows of 128 bytes whose 16-byte pieces are swizzled by the row, so that ldmatrix meets no bank
// twice.
__device__ __forceinline__ std::uint32_t piece(std::uint32_t base, int row, int column) {
  return base + static_cast<std::uint32_t>(row * 128 + ((column ^ (row & 7)) << 4));
}

// A thread's part of loading 64 elements of kRows rows: one 16-byte piece of every (kThreads / 8)-th
// row. Addresses are computed once; with few warps their arithmetic would be the kernel's time.
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
      copy16(stage + to + static_cast<std::uint32_t>(i * (kThreads / 8) * 128), from[i], here);
      from[i] += kChunk;
    }
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads) gate_mma(const __grid_constant__ GateParams p) {
  extern __shared__ __align__(128) unsigned char raw[];
  const std::uint32_t ring = shared_address(raw);
  const int lane = static_cast<int>(threadIdx.x & 31U), warp = static_cast<int>(threadIdx.x >> 5);
  const int rank = T::kCluster ? static_cast<int>(blockIdx.x % kGroups) : 0;
  const std::int64_t first_expert =
      static_cast<std::int64_t>(T::kCluster ? blockIdx.x / kGroups : blockIdx.x) * T::kExperts;
  const std::int64_t first_token = static_cast<std::int64_t>(blockIdx.y) * T::kTokens;
  const int my_expert = warp % T::kWarpsE * (T::kM * 16), my_token = warp / T::kWarpsE * (T::kN * 8);
  const auto* const weight = static_cast<const std::uint16_t*>(p.weight);
  const auto* const x = static_cast<const std::uint16_t*>(p.x);

  const int steps = slice_steps(p.hidden);
  const int group_chunks = steps * kSlicesOfGroup / kStepsOfChunk;  // exact: four slices, four steps
  const int chunks = group_chunks * (T::kCluster ? 1 : kGroups);
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
    asm volatile("cp.async.commit_group;" ::: "memory");
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
    asm volatile("cp.async.wait_group %0;" ::"n"(T::kStages - 2) : "memory");
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
      if (++slice < kSlicesOfGroup) continue;
      slice = 0;
      each([](float&, float& b, float& c) {
        c = __fadd_rn(c, b);
        b = 0;
      });
    }
  }

  // This thread's experts and tokens.
  const int row = my_expert + lane / 4, column = my_token + lane % 4 * 2;
  const auto store = [&](std::int64_t expert, std::int64_t token, float v) {
    if (expert >= p.experts || token >= p.tokens) return;
    p.logits[token * p.experts + expert] = p.bias != nullptr ? __fadd_rn(v, p.bias[expert]) : v;
  };
  if constexpr (!T::kCluster) {
#pragma unroll
    for (int m = 0; m < T::kM; ++m) {
#pragma unroll
      for (int n = 0; n < T::kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          store(first_expert + row + m * 16 + i / 2 * 8, first_token + column + n * 8 + i % 2,
                total[m][n][i]);
        }
      }
    }
  } else {
    // The block's sums [tokens, experts] in shared memory; block r adds up all eight for its share.
    asm volatile("cp.async.wait_group 0;" ::: "memory");
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
    constexpr int kShare = T::kExperts * T::kTokens / kGroups;
    for (int i = static_cast<int>(threadIdx.x); i < kShare; i += T::kThreads) {
      const int at = rank * kShare + i;
      float sum = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        sum = __fadd_rn(sum, *cluster.map_shared_rank(sums + at, static_cast<unsigned>(g)));
      }
      store(first_expert + at % T::kExperts, first_token + at / T::kExperts, sum);
    }
    cluster.sync();  // nobody leaves while others read its sums
  }
}

template <class T>
cudaError_t launch(const GateParams& p, void* stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      gate_mma<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = kGroups;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  const auto blocks = static_cast<unsigned>((p.experts + T::kExperts - 1) / T::kExperts);
  config.gridDim = dim3(T::kCluster ? blocks * kGroups : blocks,
                        static_cast<unsigned>((p.tokens + T::kTokens - 1) / T::kTokens));
  config.blockDim = dim3(T::kThreads);
  config.dynamicSmemBytes = T::kBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = T::kCluster ? 2 : 1;
  return cudaLaunchKernelEx(&config, gate_mma<T>, p);
}

}  // namespace

bool gate_fits_tensor_cores(const GateParams& p) {
  return p.x_dtype == DType::kBF16 && !p.weight_f32 && p.hidden % 8 == 0 && p.tokens <= (1 << 21);
}

int launch_gate_mma(const GateParams& p, void* stream) {
  const std::int64_t tiles = ((p.experts + 127) / 128) * ((p.tokens + 63) / 64);
  // Eight blocks per tile until the tiles alone fill the device.
  constexpr std::int64_t kEnoughTiles = 128;
  return static_cast<int>(p.tokens <= SmallTile::kTokens ? launch<SmallTile>(p, stream)
                          : tiles < kEnoughTiles         ? launch<SplitTile>(p, stream)
                                                         : launch<WholeTile>(p, stream));
}

}  // namespace moesaic::cuda
