// The products of an item whose weights are decoded (grouped_gemm.cuh): which warpgroups multiply what, and
// which of the two matrices' codes.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "experts/sm90/gemm_layout.cuh"

namespace moesaic::cuda {

// Sums of a slab's second block, from the warp that has them to the one that has the epilogue of
// their rows: `to`, of the same lane. Every lane arrives for itself: where a warp has converged its
// __syncwarp is no instruction, and racecheck takes one lane that arrives for all to be a race.
template <int kColumns, class Shared>
__device__ __forceinline__ void send_block(const Shared& sh, RingPosition<1>& sent, int to,
                                           int lane, const float (&sums)[kColumns / 2]) {
  ptx::mbarrier_wait(sh.sent_empty(to), sent.parity() ^ 1);
  float4* const at = sh.sent(to) + lane;
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    at[32 * i] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }
  ptx::mbarrier_arrive(sh.sent_full(to));
  sent.advance();
}

// Slabs of several warpgroups: each multiplies its share, and the first is given the sums of the other
// block. Whether this is the first, which has all sums of the item. One loop for all of them.
template <class Weights, class Format, class Tile, int kColumns>
__device__ __forceinline__ bool multiply_share(const Shared<Format, Tile>& sh,
                                               RingPosition<Layout<Format, Tile>::kStages>& ring,
                                               RingPosition<1>& sent, int chunks, int group,
                                               int warp, int lane, float (&acc)[2][kColumns / 2]) {
  using L = Layout<Format, Tile>;
  int block = warp < L::kEpilogueWarps ? 0 : 1;
  MOESAIC_CUDA_FAULT(cuda_second_block_is_the_first, block = 0;)
  Weights::template blocks<Format, Tile, kColumns>(
      sh, ring, chunks, group, block, lane, reinterpret_cast<float(&)[1][kColumns / 2]>(acc[0]));
  if (warp >= L::kEpilogueWarps) {
    send_block<kColumns>(sh, sent, warp - L::kEpilogueWarps, lane, acc[0]);
    return false;
  }
  ptx::mbarrier_wait(sh.sent_full(warp), sent.parity());
  const float4* const at = sh.sent(warp) + lane;
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    const float4 v = at[32 * i];
    acc[1][4 * i] = v.x, acc[1][4 * i + 1] = v.y, acc[1][4 * i + 2] = v.z, acc[1][4 * i + 3] = v.w;
  }
  ptx::mbarrier_arrive(sh.sent_empty(warp));
  sent.advance();
  return true;
}

// All products of an item of one GEMM, with the codes of its matrix. Whether this thread has sums.
template <class Format, class Tile, int kColumns>
__device__ __forceinline__ bool multiply_codes(const GroupedParams& p,
                                               const Shared<Format, Tile>& sh,
                                               RingPosition<Layout<Format, Tile>::kStages>& ring,
                                               RingPosition<1>& sent, bool second, int group,
                                               int warp, int lane, float (&acc)[2][kColumns / 2]) {
  using L = Layout<Format, Tile>;
  const auto multiply = [&]<class Own>(const Shared<Format, Tile>& of, int chunks) {
    if constexpr (L::kSlabGroups == 1) {
      Own::template columns<Format, Tile, kColumns>(of, ring, chunks, group, lane, false, acc);
      return true;
    } else {
      return multiply_share<Own, Format, Tile, kColumns>(of, ring, sent, chunks, group, warp, lane,
                                                         acc);
    }
  };
  using OfW13 = typename Format::Weights;
  if constexpr (L::kTwoForms) {
    if (second) {
      const CodeImage* image = &p.codes2;
      MOESAIC_CUDA_FAULT(cuda_experts_w2_has_the_image_of_w13, image = &p.codes;)
      using OfW2 = typename L::OfW2::Weights;
      return multiply.template operator()<OfW2>(sh.with(*image), p.chunks2);
    }
    return multiply.template operator()<OfW13>(sh, p.chunks1);
  } else {
    return multiply.template operator()<OfW13>(sh, second ? p.chunks2 : p.chunks1);
  }
}

}  // namespace moesaic::cuda
