// Two warpgroups that take turns with the sums of a block of 64 rows (gemm_codes.cuh), for one token:
// decoding a slab is then a chain of latencies on few multiprocessors. The second sends its sums and
// their scales to the first, which adds all of them in the order of K: the bits are those of one
// warpgroup.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

struct NoTurns {
  static constexpr bool kTaken = false;
};

template <class Shared>
struct SumTurns {
  static constexpr bool kTaken = true;
  const Shared& sh;
  RingPosition<kTurnSlots>& ring;  // a warp's, of what it sends or receives
  int block, second, lane;         // second: of the two warpgroups
  int count = 0;                   // of sums that have been passed, by either

  // Whether the next sums are this warpgroup's.
  __device__ __forceinline__ bool take() {
    ++count;
    return (count & 1) != second;
  }
  template <int kRegisters>
  __device__ __forceinline__ void send(const float (&sums)[kRegisters], const float (&scale)[2]) {
    ptx::mbarrier_wait(sh.turn_empty(ring.slot, place()), ring.parity ^ 1);
    float* const at = sh.turn(ring.slot, place()) + lane;
    at[0] = scale[0];
    at[32] = scale[1];
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) at[32 * (i + 2)] = sums[i];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sh.turn_full(ring.slot, place()));
    ring.advance();
  }
  // The other's next sums, times their scales.
  template <int kRegisters>
  __device__ __forceinline__ void add(float (&acc)[kRegisters]) {
    ptx::mbarrier_wait(sh.turn_full(ring.slot, place()), ring.parity);
    const float* const at = sh.turn(ring.slot, place()) + lane;
    float scale[2] = {at[0], at[32]};
    MOESAIC_CUDA_FAULT(cuda_turns_lose_sums, scale[0] = 0.0F;)
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      acc[i] = fmaf(at[32 * (i + 2)], scale[(i & 2) != 0 ? 1 : 0], acc[i]);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(sh.turn_empty(ring.slot, place()));
    ring.advance();
  }

 private:
  __device__ __forceinline__ int place() const {
    return block * kGroupWarps + (static_cast<int>(threadIdx.x) >> 5) % kGroupWarps;
  }
};

}  // namespace moesaic::cuda
