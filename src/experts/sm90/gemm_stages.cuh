// How the consumer warpgroups of the grouped-GEMM kernel (grouped_gemm.cuh) pass through the stages
// of an item.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// The next item. Every lane hands its place back for itself: the order of a read before an arrival
// by another lane of the warp is one that racecheck does not follow.
template <class Format, class Tile>
__device__ __forceinline__ Item take_item(const Shared<Format, Tile>& sh,
                                          RingPosition<kItemSlots>& slot, int lane) {
  ptx::mbarrier_wait(sh.item_full(slot.slot()), slot.parity());
  const Item item = sh.items()[slot.slot()];
  // No instruction, but a branch: without one the compiler keeps more in registers from item to item
  // than there are (int4: 40 bytes of stack for 16, 2 to 3 % slower).
  if (lane == 0) asm volatile("" ::: "memory");
  ptx::mbarrier_arrive(sh.item_empty(slot.slot()));
  slot.advance();
  return item;
}

// The stages of an item as a consumer warp passes through them.
template <class Format, class Tile>
struct StageReader {
  using L = Layout<Format, Tile>;
  using Ring = RingPosition<L::kStages>;
  const Shared<Format, Tile>& sh;
  Ring& ring;
  const int lane;
  bool ready = false;  // the stage at `ring` is known to be full

  // The stage at `ring` may be read, also by wgmma.
  __device__ __forceinline__ void wait() const {
    if (!ready) ptx::mbarrier_wait(sh.full(ring.slot()), ring.parity());
    ptx::fence_proxy_async();  // for the gathered token rows
  }
  // Looks at the next stage, where the time for that is hidden by products in flight.
  __device__ __forceinline__ void peek() {
    Ring next = ring;
    next.advance();
    ready = ptx::mbarrier_test(sh.full(next.slot()), next.parity());
  }
  // This warp has read the stage at `ring`.
  __device__ __forceinline__ void release_and_advance() const {
    release(ring.slot());
    ring.advance();
  }
  // This warp has read the stage of `slot`.
  __device__ __forceinline__ void release(std::uint32_t slot) const {
    if constexpr (L::kReleaseLanes > 1) {
      ptx::mbarrier_arrive(sh.empty(slot));
      return;
    }
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(sh.empty(slot));
      if (Tile::kPaired) ptx::mbarrier_arrive_remote(sh.empty(slot), ptx::cluster_cta_rank() ^ 1);
    }
  }
  // Distance of the stage's tiles from those of stage 0, in units of descriptors.
  __device__ __forceinline__ std::uint32_t offset() const {
    return __shfl_sync(0xFFFFFFFFU, ring.slot(), 0) *
           static_cast<std::uint32_t>(L::kStageBytes >> 4);
  }
};

// Hands back the stages of an item that is another warpgroup's.
template <class Format, class Tile>
__device__ __forceinline__ void pass_item(const Shared<Format, Tile>& sh,
                                          RingPosition<Layout<Format, Tile>::kStages>& ring,
                                          int chunks, int lane) {
  using L = Layout<Format, Tile>;
  const StageReader<Format, Tile> stage{sh, ring, lane};
  for (int left = chunks; left > 0; left -= L::next_chunks(left)) {
    ptx::mbarrier_wait(sh.full(ring.slot()), ring.parity());
    stage.release_and_advance();
  }
}

// Distances of neighbouring chunks' tiles from those of the first chunk of stage 0, in units of
// descriptors.
template <int kCount>
struct Chunks {
  std::uint32_t offset[kCount];
};

// The first kCount chunks of the stage at `stage`, once they may be read.
template <int kCount, class Stage>
__device__ __forceinline__ Chunks<kCount> wait_for_chunks(const Stage& stage) {
  static_assert(kCount <= Stage::L::kStageChunks);
  Chunks<kCount> at;
  at.offset[0] = stage.offset();
#pragma unroll
  for (int c = 1; c < kCount; ++c) {
    at.offset[c] = at.offset[c - 1] + (Stage::L::kPartBytes >> 4);
    MOESAIC_CUDA_FAULT(cuda_second_chunk_is_the_first, at.offset[c] = at.offset[0];)
  }
  stage.wait();
  return at;
}

// d = the products of the chunks at `at`, four steps each, whose weights fragment(chunk, step, a)
// decodes: kSteps at a time, while the products of at most kInFlight times before are in flight. Some
// still are at the end.
template <class Mma, int kSteps, int kInFlight, int kCount, int kRegisters, class Fragment>
__device__ __forceinline__ void multiply_fragments(const Chunks<kCount>& at, std::uint32_t tokens,
                                                   const Fragment& fragment,
                                                   float (&d)[kRegisters]) {
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    const std::uint64_t tile = ptx::wgmma_whole_descriptor(tokens + at.offset[s]);
#pragma unroll
    for (int k = 0; k < 4; k += kSteps) {
      std::uint32_t a[kSteps][4];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) fragment(s, k + i, a[i]);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        Mma::run(d, a[i], tile + static_cast<std::uint32_t>(k + i) * ptx::kWgmmaStep,
                 s > 0 || k + i > 0 ? 1 : 0);
      }
      ptx::wgmma_commit();
      if (s + 1 < kCount || k + kSteps < 4) ptx::wgmma_wait<kInFlight>();
    }
  }
}

}  // namespace moesaic::cuda
