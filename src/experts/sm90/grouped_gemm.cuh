// The persistent grouped-GEMM kernel; see grouped_gemm.h for what it does. Template parameters: the
// number format (format_parts.h), the tile of tokens (TokenTile) and the activation family
// (activation.cuh).
//
// Threads: warps 0-7 are two consumer warpgroups (128 weight rows each), the next one streams weights
// with bulk copies and hands out work items, the last three gather token rows. Weights that are
// decoded for few tokens have four consumer warpgroups (64 rows each). Shared memory is a ring of
// stages (32 KiB of weights, up to max_columns token rows, scales; or two chunks of codes and rows)
// guarded by full/empty barriers, and a small ring of work items. The split build has one consumer
// warpgroup per CTA and stages of 16 KiB of weights; the two CTAs of a cluster work through the same
// items.
#pragma once

#include "experts/sm90/gemm_consumers.cuh"
#include "experts/sm90/gemm_producers.cuh"
#include "experts/sm90/in_kernel_routing.cuh"
#include "experts/sm90/work_list.cuh"

namespace moesaic::cuda {

template <class Format, class Tile, class Epilogue>
__global__ void __launch_bounds__(Layout<Format, Tile>::kBoundThreads,
                                  Layout<Format, Tile>::kBoundBlocks)
    sm90_grouped_experts(const __grid_constant__ GroupedParams p) {
  using L = Layout<Format, Tile>;
  constexpr bool kCluster = Tile::kPaired || L::kSplit;
  extern __shared__ char raw[];
  const std::uint32_t unaligned = ptx::shared_address(raw), base = (unaligned + 1023U) & ~1023U;
  const Shared<Format, Tile> sh{base, raw + (base - unaligned), p.codes, p.chunks_of_sums};
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      ptx::mbarrier_init(sh.full(s), 1 + 32 * kTokenWarps);
      ptx::mbarrier_init(sh.empty(s),
                         L::kConsumerWarps * L::kReleaseLanes * (Tile::kPaired ? 2 : 1));
    }
    for (int s = 0; s < kItemSlots; ++s) {
      ptx::mbarrier_init(sh.item_full(s), 1);
      ptx::mbarrier_init(sh.item_empty(s), 32 * (L::kConsumerWarps + kTokenWarps));
    }
    for (int s = 0; s < kIndexSlots; ++s) ptx::mbarrier_init(sh.index_full(s), 1);
    for (int s = 0; L::kSplit && s < 2; ++s) ptx::mbarrier_init(sh.amax_full(s), 1);
    for (int w = 0; w < L::kSentBars; ++w) {
      ptx::mbarrier_init(sh.sent_full(w), 32);
      ptx::mbarrier_init(sh.sent_empty(w), 32);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (L::kHasTable) {
    auto* const pairs = reinterpret_cast<std::uint32_t*>(sh.generic + L::kOffsetPairs);
    for (int i = static_cast<int>(threadIdx.x); i < kTableBytes / 4; i += L::kThreads) {
      int byte = i / (kTablePairBytes / 4);
      MOESAIC_CUDA_FAULT(cuda_codes_have_one_half_of_the_table, byte &= 0x77;)
      pairs[i] = pair_of_table(p.codes.table, byte);
    }
  }
  if (kCluster) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  constexpr bool kRoutes = L::kMakesList && Epilogue::kRoutes;
  if constexpr (kRoutes) {
    if (p.own_list.routes) prepare_routing<L::kThreads>(p, *sh.list());
    if (threadIdx.x == L::kConsumerThreads) prefetch_ahead(p, 2 * L::slab_bytes(p.codes));
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if constexpr (kRoutes) {
    if (p.own_list.routes) {
      route_tokens<L::kThreads>(p, *sh.list());
      if (p.own_list.route.tokens > 1) __syncthreads();
    }
  }
  if constexpr (L::kMakesList) {
    if (p.own_list.pairs > 0) {
      if (warp == 0) make_list(p, Tile::kMaxColumns, lane, *sh.list());
      __syncthreads();
    }
  }
  if (warp >= L::kConsumerWarps) {
    if constexpr (!L::kSplit) ptx::registers_decrease<L::kProducerRegisters>();
    if (warp == L::kConsumerWarps) {
      if (lane == 0) produce_weights<Format, Tile>(p, sh);
      __syncwarp();
    } else {
      produce_tokens<Format, Tile>(p, sh, warp - L::kConsumerWarps - 1, lane);
    }
  } else {
    if constexpr (!L::kSplit) ptx::registers_increase<L::kConsumerRegisters>();
    consume<Format, Tile, Epilogue>(p, sh, warp, lane);
  }
  // A CTA must outlive the copies and arrivals that its neighbour sends.
  if (kCluster) ptx::cluster_sync();
}

}  // namespace moesaic::cuda
