// What the consumer warpgroups of the grouped-GEMM kernel (grouped_gemm.cuh) do with a stage,
// whichever operand the tokens are.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// The stages of an item as a consumer warp passes through them.
template <class Operand, int kMaxColumns, bool kPaired>
struct StageReader {
  using L = Layout<Operand, kMaxColumns>;
  using Ring = RingPosition<L::kStages>;
  const Shared<Operand, kMaxColumns, kPaired>& sh;
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
      if (kPaired) ptx::mbarrier_arrive_remote(sh.empty(slot), ptx::cluster_cta_rank() ^ 1);
    }
  }
  // Distance of the stage's tiles from those of stage 0, in units of descriptors.
  __device__ __forceinline__ std::uint32_t offset() const {
    return __shfl_sync(0xFFFFFFFFU, ring.slot, 0) * static_cast<std::uint32_t>(L::kStageBytes >> 4);
  }
};

// The four K steps of a stage: d = or += a b^T.
template <class Mma, int kRegisters>
__device__ __forceinline__ void multiply_stage(float (&d)[kRegisters], std::uint32_t a,
                                               std::uint32_t b, bool accumulate) {
#pragma unroll
  for (std::uint32_t k = 0; k < 4; ++k) {
    Mma::run(d, ptx::wgmma_descriptor(a + k * ptx::kWgmmaStep),
             ptx::wgmma_descriptor(b + k * ptx::kWgmmaStep), accumulate || k > 0 ? 1 : 0);
  }
}

// `chunks` stages that need no scales: a stage's products stay in flight while the next one's are
// issued. issue(offset) issues those of the stage at `offset`.
template <class Stage, class Issue>
__device__ __forceinline__ void accumulate_stages(Stage& stage, int chunks, const Issue& issue) {
  std::uint32_t previous = 0;
  for (int c = 0; c < chunks; ++c) {
    stage.wait();
    issue(stage.offset());
    ptx::wgmma_commit();
    stage.peek();
    ptx::wgmma_wait<1>();
    if (c > 0) stage.release(previous);
    previous = stage.ring.slot;
    stage.ring.advance();
  }
  ptx::wgmma_wait<0>();
  stage.release(previous);
}

}  // namespace moesaic::cuda
