// The gate for many tokens (cuda_gate_mma.cuh has the arithmetic): tiles of tokens by experts on
// whole-warpgroup multiplies, whose accumulators have the bits of the chains of m16n8k16 of the
// other kernels. One warpgroup loads, two multiply.
//
// A block has all eight groups of K of a tile, or a cluster of four or eight blocks shares them:
// then each leaves the sums of its groups in shared memory, and adds up all eight for its tokens.
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/once_per_device.h"
#include "cuda/ptx/wgmma.cuh"
#include "gate/cuda_gate_clusters.cuh"
#include "gate/cuda_gate_mma.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kChunk = 64;  // elements of K per stage: rows of 128 bytes
constexpr int kLoaders = 128, kMultipliers = 256;
constexpr int kConsumerWarps = kMultipliers / 32;
constexpr int kSumBarrier = 1;

// Tokens by experts of a block, and the blocks that share its K. Shared memory: the ring, which the
// sums of the groups replace in the end, then barriers (full, empty) of each stage.
template <int Tokens, int Experts, int Cluster>
struct Tile {
  static constexpr int kTokens = Tokens, kExperts = Experts, kCluster = Cluster;
  static constexpr int kGroups = kGateGroups / Cluster;  // of a block
  // Of a warpgroup: 64 tokens and all experts, or all tokens and half of the experts.
  static constexpr bool kSplitTokens = Tokens == 128;
  static constexpr int kColumns = kSplitTokens ? Experts : Experts / 2;
  static constexpr int kRegisters = kColumns / 2;
  static constexpr int kStageBytes = (Tokens + Experts) * 128;
  static constexpr int kStages = 196608 / kStageBytes;
  static constexpr int kRing = kStages * kStageBytes;
  static constexpr int kSumPitch = Experts + 8;  // stores of two floats meet no bank twice
  static constexpr int kBytes = kRing + kStages * 16;
  static_assert(Tokens == 64 || kSplitTokens);
  static_assert(Cluster == 1 || kGroups * Tokens * kSumPitch * 4 <= kRing);
  static_assert(kBytes <= kGateSharedLimit);
};

struct Place {
  std::uint32_t ring = 0;
  int rank = 0;   // in the cluster
  int steps = 0;  // of a slice, and chunks of a group: four slices of steps, four steps a chunk
  std::int64_t first_token = 0, first_expert = 0;
};

template <class T>
__device__ __forceinline__ std::uint32_t full(const Place& at, int stage) {
  return at.ring + static_cast<std::uint32_t>(T::kRing + stage * 16);
}
template <class T>
__device__ __forceinline__ std::uint32_t empty(const Place& at, int stage) {
  return full<T>(at, stage) + 8;
}

// A thread's part of loading chunks of kRows rows of a matrix: 16 bytes of every 16th row, swizzled
// by the row. What is not there becomes zeros. Few instructions, as there is one loading warp per
// scheduler to run them.
template <int kRows>
struct RowLoader {
  static constexpr int kStep = kLoaders / 8, kCount = kRows / kStep;
  const std::uint16_t* from = nullptr;  // the thread's piece of the next chunk of its first row
  std::int64_t stride = 0;              // between its rows
  int there = 0;                        // so many of its rows are
  int left = 0;                         // elements of the rows from its piece on
  std::uint32_t to = 0;                 // in a stage

  __device__ RowLoader(const void* matrix, std::int64_t first, std::int64_t rows, int hidden,
                       int k) {
    const int thread = static_cast<int>(threadIdx.x) - kMultipliers;
    const int row = thread / 8, piece = thread % 8;
    from = static_cast<const std::uint16_t*>(matrix) + (first + row) * hidden + k + piece * 8;
    stride = static_cast<std::int64_t>(kStep) * hidden;
    const std::int64_t behind = rows - first - row;
    there = behind <= 0 ? 0
                        : static_cast<int>(
                              min((behind + kStep - 1) / kStep, static_cast<std::int64_t>(kCount)));
    left = hidden - k - piece * 8;
    to = static_cast<std::uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
  }
  __device__ __forceinline__ void load(std::uint32_t stage) {
    const std::uint16_t* at = from;
    const int count = left > 0 ? there : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      ptx::async_load_16(stage + to + static_cast<std::uint32_t>(i * kStep * 128), at, i < count);
      at += stride;
    }
    from += kChunk;
    left -= kChunk;
  }
};

template <class T>
__device__ __forceinline__ void load_tile(const GateParams& p, const Place& at) {
  const int chunks = at.steps * T::kGroups, first = at.rank * chunks * kChunk;
  RowLoader<T::kExperts> weight(p.weight, at.first_expert, p.experts, p.hidden, first);
  RowLoader<T::kTokens> x(p.x, at.first_token, p.tokens, p.hidden, first);
  const auto load_weight = [&](int stage) {
    weight.load(at.ring + static_cast<std::uint32_t>(stage * T::kStageBytes + T::kTokens * 128));
  };
  const auto load_x = [&](int stage) {
    x.load(at.ring + static_cast<std::uint32_t>(stage * T::kStageBytes));
    ptx::async_arrive(full<T>(at, stage));
  };
  // Weights do not depend on the kernels in front.
  const int early = min(chunks, T::kStages);
  for (int c = 0; c < early; ++c) load_weight(c);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  for (int c = 0; c < early; ++c) load_x(c);
  int stage = 0;
  std::uint32_t parity = 0;
  for (int c = early; c < chunks; ++c) {
    ptx::mbarrier_wait(empty<T>(at, stage), parity);
    load_weight(stage);
    load_x(stage);
    if (++stage < T::kStages) continue;
    stage = 0;
    parity ^= 1;
  }
}

template <int kRegisters>
__device__ __forceinline__ void add(float (&to)[kRegisters], const float (&v)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) to[i] = __fadd_rn(to[i], v[i]);
}
template <int kRegisters>
__device__ __forceinline__ void clear(float (&v)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) v[i] = 0;
}

// Issues so many steps of 16 elements of K.
template <class T, int kSteps>
__device__ __forceinline__ void multiply_steps(std::uint32_t a, std::uint32_t b, bool accumulate,
                                               float (&part)[T::kRegisters]) {
  ptx::wgmma_fence();
#pragma unroll
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    ptx::Wgmma<ptx::BF16, T::kColumns>::run(part, ptx::wgmma_descriptor(a + s * ptx::kWgmmaStep),
                                            ptx::wgmma_descriptor(b + s * ptx::kWgmmaStep),
                                            accumulate || s > 0 ? 1 : 0);
  }
  ptx::wgmma_commit();
}

// Where a warpgroup stands: stage and parity of the next chunk, steps of it that are done, the
// stage that may be released next.
struct Cursor {
  int stage = 0, step = 0, used = -1;
  std::uint32_t parity = 0;
};

// Adds the four slices of the next group of this block.
template <class T>
__device__ __forceinline__ void multiply_group(const Place& at, int group, int lane, Cursor& next,
                                               float (&sum)[T::kRegisters]) {
  const std::uint32_t a =
      ptx::wgmma_tile(at.ring + (T::kSplitTokens ? static_cast<std::uint32_t>(group) * 8192 : 0));
  const std::uint32_t b = ptx::wgmma_tile(
      at.ring + T::kTokens * 128 +
      (T::kSplitTokens ? 0 : static_cast<std::uint32_t>(group) * T::kColumns * 128));
  clear(sum);
  for (int slice = 0; slice < kGateSlicesOfGroup; ++slice) {
    float part[T::kRegisters];
    for (int done = 0; done < at.steps;) {
      if (next.step == 0) {
        ptx::mbarrier_wait(full<T>(at, next.stage), next.parity);
        ptx::fence_proxy_async();
      }
      const int count = min(4 - next.step, at.steps - done);
      const auto k = static_cast<std::uint32_t>(next.stage * (T::kStageBytes >> 4)) +
                     static_cast<std::uint32_t>(next.step) * ptx::kWgmmaStep;
      if (count == 4) {
        multiply_steps<T, 4>(a + k, b + k, done > 0, part);
      } else if (count == 3) {
        multiply_steps<T, 3>(a + k, b + k, done > 0, part);
      } else if (count == 2) {
        multiply_steps<T, 2>(a + k, b + k, done > 0, part);
      } else {
        multiply_steps<T, 1>(a + k, b + k, done > 0, part);
      }
      // These products stay in flight while the next ones are issued; the chunk before is done.
      ptx::wgmma_wait<1>();
      if (next.step == 0 && next.used >= 0) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(empty<T>(at, next.used));
      }
      done += count;
      next.step += count;
      if (next.step < 4) continue;
      next.used = next.stage;
      next.step = 0;
      if (++next.stage < T::kStages) continue;
      next.stage = 0;
      next.parity ^= 1;
    }
    ptx::wgmma_wait<0>();
    add(sum, part);
  }
}

// f(register, token, expert) of the thread's place in a tile: pairs of neighbouring experts.
template <class T, class F>
__device__ __forceinline__ void each_pair(int group, int warp, int lane, const F& f) {
  const int token = (T::kSplitTokens ? group * 64 : 0) + (warp & 3) * 16 + lane / 4;
  const int expert = (T::kSplitTokens ? 0 : group * T::kColumns) + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < T::kColumns / 8; ++j) {
    f(4 * j, token, expert + 8 * j);
    f(4 * j + 2, token + 8, expert + 8 * j);
  }
}

__device__ __forceinline__ void load_remote(std::uint32_t address, std::uint32_t cta,
                                            float (&v)[4]) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
      : "r"(address), "r"(cta)
      : "memory");
}

// Logits of kCount neighbouring experts of a token, in one store where they are aligned for it.
template <int kCount>
__device__ __forceinline__ void store_logits(const GateParams& p, std::int64_t expert,
                                             std::int64_t token, const float (&v)[kCount]) {
  using Vector = std::conditional_t<kCount == 4, float4, float2>;
  static_assert(sizeof(Vector) == kCount * sizeof(float));
  const bool aligned =
      p.experts % kCount == 0 && reinterpret_cast<std::uintptr_t>(p.logits) % sizeof(Vector) == 0;
  if (!aligned) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) store_logit(p, expert + e, token, v[e]);
    return;
  }
  if (expert >= p.experts || token >= p.tokens) return;
  float sum[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    sum[e] = p.bias != nullptr ? __fadd_rn(v[e], p.bias[expert + e]) : v[e];
  }
  Vector packed;
  __builtin_memcpy(&packed, sum, sizeof(packed));
  *reinterpret_cast<Vector*>(p.logits + token * p.experts + expert) = packed;
}

// All eight groups of this block's share of the cluster's tile.
template <class T>
__device__ __forceinline__ void sum_share(const GateParams& p, const Place& at) {
  constexpr int kShare = T::kTokens / T::kCluster, kQuads = T::kExperts / 4;
  for (int i = static_cast<int>(threadIdx.x); i < kShare * kQuads; i += kMultipliers) {
    const int token = at.rank * kShare + i / kQuads, expert = i % kQuads * 4;
    float part[kGateGroups][4], sum[4] = {};
#pragma unroll
    for (int g = 0; g < kGateGroups; ++g) {
      const int row = g % T::kGroups * T::kTokens + token;
      load_remote(at.ring + static_cast<std::uint32_t>((row * T::kSumPitch + expert) * 4),
                  static_cast<std::uint32_t>(g / T::kGroups), part[g]);
    }
#pragma unroll
    for (const auto& v : part) add(sum, v);
    store_logits(p, at.first_expert + expert, at.first_token + token, sum);
  }
}

template <class T>
__device__ __forceinline__ void multiply_tile(const GateParams& p, const Place& at, char* shared) {
  const int lane = static_cast<int>(threadIdx.x & 31U);
  const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x >> 5), 0);
  const int group = warp >> 2;
  Cursor next;
  if constexpr (T::kCluster == 1) {
    float sum[T::kRegisters], total[T::kRegisters];
    clear(total);
    for (int g = 0; g < T::kGroups; ++g) {
      multiply_group<T>(at, group, lane, next, sum);
      add(total, sum);
    }
    ptx::grid_dependency_wait();
    each_pair<T>(group, warp, lane, [&](int i, int token, int expert) {
      store_logits(p, at.first_expert + expert, at.first_token + token, {total[i], total[i + 1]});
    });
  } else {
    float sum[T::kGroups][T::kRegisters];
#pragma unroll
    for (int g = 0; g < T::kGroups; ++g) multiply_group<T>(at, group, lane, next, sum[g]);
    // Everything loaded has been waited for, so the ring is free once all have multiplied.
    ptx::named_barrier_sync(kSumBarrier, kMultipliers);
    auto* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int g = 0; g < T::kGroups; ++g) {
      each_pair<T>(group, warp, lane, [&](int i, int token, int expert) {
        *reinterpret_cast<float2*>(sums + (g * T::kTokens + token) * T::kSumPitch + expert) =
            make_float2(sum[g][i], sum[g][i + 1]);
      });
    }
    ptx::cluster_sync();
    ptx::grid_dependency_wait();
    sum_share<T>(p, at);
    ptx::cluster_sync();  // nobody leaves while others read its sums
  }
}

template <class T>
__global__ void __launch_bounds__(kLoaders + kMultipliers, 1)
    gate_many(const __grid_constant__ GateParams p) {
  extern __shared__ __align__(1024) char shared[];
  Place at;
  at.ring = ptx::shared_address(shared);
  at.rank = T::kCluster > 1 ? static_cast<int>(ptx::cluster_cta_rank()) : 0;
  at.steps = gate_slice_steps(p.hidden);
  at.first_token = static_cast<std::int64_t>(blockIdx.y) * T::kTokens;
  at.first_expert = static_cast<std::int64_t>(blockIdx.x / T::kCluster) * T::kExperts;
  if (threadIdx.x == 0) {
    for (int s = 0; s < T::kStages; ++s) {
      ptx::mbarrier_init(full<T>(at, s), kLoaders);
      ptx::mbarrier_init(empty<T>(at, s), kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kMultipliers) {
    ptx::registers_decrease<72>();
    load_tile<T>(p, at);
    if (T::kCluster > 1) {
      ptx::cluster_sync();
      ptx::cluster_sync();
    }
  } else {
    ptx::registers_increase<216>();
    multiply_tile<T>(p, at, shared);
  }
}

template <int Tokens, int Experts, int Cluster>
cudaError_t launch(const GateParams& p, void* stream) {
  using T = Tile<Tokens, Experts, Cluster>;
  static OncePerDevice once;
  const cudaError_t prepared = once([] { return allow_all_shared_memory(gate_many<T>); });
  if (prepared != cudaSuccess) return prepared;
  return launch_gate_clusters(gate_many<T>, p, Cluster, (p.experts + Experts - 1) / Experts,
                              static_cast<int>((p.tokens + Tokens - 1) / Tokens),
                              kLoaders + kMultipliers, T::kBytes, stream);
}

}  // namespace

int launch_gate_many(const GateParams& p, void* stream) {
  const ManyTokensGrid g = many_tokens_grid(p);
  const auto run = [&]<int Tokens, int Experts>(std::integral_constant<int, Tokens>,
                                                std::integral_constant<int, Experts>) {
    if (g.cluster == 8) return launch<Tokens, Experts, 8>(p, stream);
    if constexpr (Tokens * 2 != Experts) {
      if (g.cluster == 4) return launch<Tokens, Experts, 4>(p, stream);
    }
    return launch<Tokens, Experts, 1>(p, stream);
  };
  constexpr std::integral_constant<int, 64> k64;
  constexpr std::integral_constant<int, 128> k128;
  return static_cast<int>(g.tokens == 128    ? run(k128, k128)
                          : g.experts == 128 ? run(k64, k128)
                                             : run(k64, k64));
}

}  // namespace moesaic::cuda
