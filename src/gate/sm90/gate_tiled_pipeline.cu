// The gate for more tokens or longer rows than gate_resident_weights.cu takes (gate_mma.cuh has the
// arithmetic): tiles of tokens by experts on whole-warpgroup multiplies, whose accumulators have
// the bits of the chains of m16n8k16 of the other kernels. One warpgroup loads, two multiply.
//
// A block has all eight groups of K of a tile, or a cluster of two, four or eight blocks shares
// them: then each leaves the sums of its groups in shared memory, and adds up all eight for its
// tokens.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "core/fault.h"
#include "cuda/fault.cuh"
#include "cuda/once_per_device.h"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_shapes_f16.cuh"
#include "gate/sm90/gate_clusters.cuh"
#include "gate/sm90/gate_tiled_pipeline_load.cuh"

namespace moesaic::cuda {
namespace gate_tiled {
namespace {

constexpr int kSumBarrier = 1;

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

// Issues kSteps steps of 16 elements of K.
template <class T, int kSteps>
__device__ __forceinline__ void multiply_steps(std::uint32_t a, std::uint32_t b, bool accumulate,
                                               float (&part)[T::kRegisters]) {
  ptx::wgmma_fence();
#pragma unroll
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    ptx::Wgmma<typename T::Element, T::kColumns>::run(
        part, ptx::wgmma_descriptor(a + s * ptx::kWgmmaStep),
        ptx::wgmma_descriptor(b + s * ptx::kWgmmaStep), accumulate || s > 0 ? 1 : 0);
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

// Calls f(register, token, expert) for each place of the thread in a tile: pairs of neighbouring
// experts.
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
      ptx::load_remote(at.ring + static_cast<std::uint32_t>((row * T::kSumPitch + expert) * 4),
                       static_cast<std::uint32_t>(g / T::kGroups), part[g]);
    }
#pragma unroll
    for (const auto& v : part) add(sum, v);
    MOESAIC_CUDA_FAULT(cuda_gate_tiles_lose_groups_of_k, sum[0] = part[0][0];)
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
    // All loads have landed, so the ring is free once all warps have multiplied.
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
    ptx::cluster_sync();  // no block ends while others read its sums
  }
}

template <class T>
__global__ void __launch_bounds__(kLoaders + kMultipliers, 1)
    gate_tiled_pipeline(const __grid_constant__ GateParams p) {
  extern __shared__ __align__(1024) char shared[];
  Place at;
  at.ring = ptx::shared_address(shared);
  at.rank = T::kCluster > 1 ? static_cast<int>(ptx::cluster_cta_rank()) : 0;
  at.steps = gate_slice_steps(p.depth());
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

template <class Element, int Tokens, int Experts, int Cluster>
cudaError_t launch(const GateParams& p, void* stream) {
  using T = Tile<Element, Tokens, Experts, Cluster>;
  static OncePerDevice once;
  const cudaError_t prepared = once([] { return allow_all_shared_memory(gate_tiled_pipeline<T>); });
  if (prepared != cudaSuccess) return prepared;
  return launch_gate_clusters(gate_tiled_pipeline<T>, p, Cluster,
                              (p.experts + Experts - 1) / Experts,
                              static_cast<int>((p.tokens + Tokens - 1) / Tokens),
                              kLoaders + kMultipliers, T::kBytes, stream);
}

}  // namespace
}  // namespace gate_tiled

namespace {

template <class Element>
int launch_tiles(const GateParams& p, const DeviceTraits& device, void* stream) {
  const TiledPipelineGrid g = tiled_pipeline_grid(p, device);
  const auto run = [&]<int Tokens, int Experts>(std::integral_constant<int, Tokens>,
                                                std::integral_constant<int, Experts>) {
    if (g.cluster == 8) return gate_tiled::launch<Element, Tokens, Experts, 8>(p, stream);
    if constexpr (Tokens * 2 != Experts) {
      if (g.cluster == 4) return gate_tiled::launch<Element, Tokens, Experts, 4>(p, stream);
    }
    if constexpr (Tokens == 64) {
      if (g.cluster == 2) return gate_tiled::launch<Element, Tokens, Experts, 2>(p, stream);
    }
    return gate_tiled::launch<Element, Tokens, Experts, 1>(p, stream);
  };
  constexpr std::integral_constant<int, 64> k64;
  constexpr std::integral_constant<int, 128> k128;
  return static_cast<int>(g.tokens == 128    ? run(k128, k128)
                          : g.experts == 128 ? run(k64, k128)
                                             : run(k64, k64));
}

}  // namespace

int launch_gate_tiled_pipeline(const GateParams& p, const DeviceTraits& device, void* stream) {
  MOESAIC_ARM_CUDA_FAULTS();
  for (std::int64_t first = 0; first < p.tokens; first += kMostGateTokens) {
    GateParams slice = p;
    const std::int64_t row = MOESAIC_FAULT(cuda_gate_launches_have_the_first_rows) ? 0 : first;
    slice.x = static_cast<const std::uint16_t*>(p.x) + row * p.hidden;
    slice.logits = p.logits + first * p.experts;
    slice.tokens = std::min(p.tokens - first, kMostGateTokens);
    const int error = p.weight_f16 ? launch_tiles<ptx::F16>(slice, device, stream)
                                   : launch_tiles<ptx::BF16>(slice, device, stream);
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace moesaic::cuda
