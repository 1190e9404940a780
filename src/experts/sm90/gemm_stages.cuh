// How the consumer warpgroups of the grouped-GEMM kernel (grouped_gemm.cuh) pass through the stages
// of an item.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// The stages of an item as a consumer warp passes through them.
template <class Format, class Tile>
struct StageReader {
  using L = Layout<Format, Tile>;
  using Ring = RingPosition<L::kStages>;
  const Shared<Format, Tile>& sh;
  Ring& ring;
  const int lane;
  bool ready = false;  // the stage at `ring` is known to be full

  // The stage at `ring` is in shared memory and may be read by wgmma.
  __device__ __forceinline__ void wait() const {
    if (!ready) ptx::mbarrier_wait(sh.full(ring.slot), ring.parity);
    ptx::fence_proxy_async();  // for the gathered token rows
  }
  // Looks at the next stage, where the time for that is hidden by products in flight.
  __device__ __forceinline__ void peek() {
    Ring next = ring;
    next.advance();
    ready = ptx::mbarrier_test(sh.full(next.slot), next.parity);
  }
  // This warp has read the stage of `slot`.
  __device__ __forceinline__ void release(std::uint32_t slot) const {
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(sh.empty(slot));
      if (Tile::kPaired) ptx::mbarrier_arrive_remote(sh.empty(slot), ptx::cluster_cta_rank() ^ 1);
    }
  }
  // Distance of the stage's tiles from those of stage 0, in units of descriptors.
  __device__ __forceinline__ std::uint32_t offset() const {
    return __shfl_sync(0xFFFFFFFFU, ring.slot, 0) * static_cast<std::uint32_t>(L::kStageBytes >> 4);
  }
};

}  // namespace moesaic::cuda
