// The persistent grouped-GEMM kernel; see grouped_gemm.h for what it does. Template parameters
// select operand format, widest token group, activation family and whether two CTAs share weights.
//
// Threads: warps 0-7 are two consumer warpgroups (128 weight rows each), warp 8 streams weights
// with bulk copies and hands out work items, warps 9-11 gather token rows. Shared memory is a ring
// of stages (32 KiB of weights, up to max_columns token rows, scales) guarded by full/empty
// barriers, and a small ring of work items. The split build has one consumer warpgroup per CTA and
// stages of 16 KiB of weights; the two CTAs of a cluster work through the same items.
#pragma once

#include "experts/sm90/gemm_consumers.cuh"
#include "experts/sm90/gemm_producers.cuh"
#include "experts/sm90/in_kernel_routing.cuh"
#include "experts/sm90/work_list.cuh"

namespace moesaic::cuda {

template <class Operand, int kMaxColumns, EpilogueKind kEpilogue, bool kPaired>
__global__ void __launch_bounds__(Layout<Operand, kMaxColumns>::kBoundThreads,
                                  Layout<Operand, kMaxColumns>::kSplit ? 2 : 1)
    sm90_grouped_experts(const __grid_constant__ GroupedParams p) {
  using L = Layout<Operand, kMaxColumns>;
  constexpr bool kCluster = kPaired || L::kSplit;
  extern __shared__ char raw[];
  Shared<Operand, kMaxColumns, kPaired> sh;
  const std::uint32_t unaligned = ptx::shared_address(raw);
  sh.base = (unaligned + 1023U) & ~1023U;
  sh.generic = raw + (sh.base - unaligned);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      ptx::mbarrier_init(sh.full(s), 1 + 32 * kTokenWarps);
      ptx::mbarrier_init(sh.empty(s), L::kConsumerWarps * (kPaired ? 2 : 1));
    }
    for (int s = 0; s < kItemSlots; ++s) {
      ptx::mbarrier_init(sh.item_full(s), 1);
      ptx::mbarrier_init(sh.item_empty(s), L::kConsumerWarps + kTokenWarps);
    }
    for (int s = 0; s < kIndexSlots; ++s) ptx::mbarrier_init(sh.index_full(s), 1);
    for (int s = 0; L::kSplit && s < 2; ++s) ptx::mbarrier_init(sh.amax_full(s), 1);
    ptx::mbarrier_init_fence();
  }
  if (kCluster) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  constexpr bool kRoutes = L::kMakesList && kEpilogue == EpilogueKind::kSwiglu;
  if constexpr (kRoutes) {
    if (p.routes) prepare_routing<L::kThreads>(p, *sh.list());
    if (threadIdx.x == L::kConsumerThreads) ask_ahead(p);
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if constexpr (kRoutes) {
    if (p.routes) {
      route_tokens<L::kThreads>(p, *sh.list());
      if (p.route.tokens > 1) __syncthreads();
    }
  }
  if constexpr (L::kMakesList) {
    if (p.list_pairs > 0) {
      if (warp == 0) make_list(p, kMaxColumns, lane, *sh.list());
      __syncthreads();
    }
  }
  if (warp >= L::kConsumerWarps) {
    if constexpr (!L::kSplit) ptx::registers_decrease<L::kProducerRegisters>();
    if (warp == L::kConsumerWarps) {
      if (lane == 0) produce_weights<Operand, kMaxColumns, kPaired>(p, sh);
      __syncwarp();
    } else {
      produce_tokens<Operand, kMaxColumns, kPaired>(p, sh, warp - L::kConsumerWarps - 1, lane);
    }
  } else {
    if constexpr (!L::kSplit) ptx::registers_increase<L::kConsumerRegisters>();
    consume<Operand, kMaxColumns, kEpilogue, kPaired>(p, sh, warp, lane);
  }
  // A CTA must outlive the copies and arrivals that its neighbour sends.
  if (kCluster) ptx::cluster_sync();
}

}  // namespace moesaic::cuda
