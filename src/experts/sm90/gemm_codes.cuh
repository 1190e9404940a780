// Weights that the grouped-GEMM kernel (grouped_gemm.cuh) decodes in registers: part `Weights` of a
// format (format_parts.h) whose image holds codes in fragment order (repack_codes.h). The weights
// are the M operand at every width.
#pragma once

#include <cstdint>

#include "cuda/fault.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_shapes_rs.cuh"
#include "experts/sm90/codes_e2m1.h"
#include "experts/sm90/gemm_stages.cuh"

namespace moesaic::cuda {

// Volatile: stays before the fence in front of the multiply that reads it.
__device__ __forceinline__ std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d = 0;
  asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// A decoder reads a thread's codes and scales of 64 rows and 64 elements of K from a slab, and
// makes the fragment of each k16 step.
struct DecodeE2M1 {
  uint4 codes;
  std::uint32_t factor[2][2];  // [32 elements][rows g, g + 8]: bf16 pairs

  // slab: its shared address; block: which 64 rows.
  __device__ __forceinline__ void load(std::uint32_t slab, int block, int thread) {
    constexpr std::uint32_t kCodeBytes = kSlabRows * 32;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                 : "r"(slab + static_cast<std::uint32_t>(block * 2048 + thread * 16))
                 : "memory");
    const std::uint32_t strip = ptx::load_shared(
        slab + kCodeBytes + static_cast<std::uint32_t>(block * 128 + (thread >> 2) * 4));
    // The exponent field of both halves.
    factor[0][0] = (strip & 0xFF) * 0x00800080U;
    factor[1][0] = (strip >> 8 & 0xFF) * 0x00800080U;
    factor[0][1] = (strip >> 16 & 0xFF) * 0x00800080U;
    factor[1][1] = (strip >> 24) * 0x00800080U;
    MOESAIC_CUDA_FAULT(cuda_codes_have_the_scale_of_the_row_above, factor[0][1] = factor[0][0];
                       factor[1][1] = factor[1][0];)
    MOESAIC_CUDA_FAULT(cuda_codes_have_the_first_scale, factor[1][0] = factor[0][0];
                       factor[1][1] = factor[0][1];)
  }
  __device__ __forceinline__ void fragment(int step, std::uint32_t (&a)[4]) const {
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    e2m1_fragment(words[step], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = multiply_bf16x2(a[i], factor[step >> 1][i & 1]);
  }
};

template <class Decoder>
struct FromCodes {
  static constexpr bool kTokensAsRows = false;

  // As FromShared::columns. A step is decoded while the products of the two before are in flight.
  // Promote: InOperand or PerStageAndRow.
  template <class Format, class Tile, int kColumns>
  static __device__ __forceinline__ void columns(const Shared<Format, Tile>& sh,
                                                 RingPosition<Layout<Format, Tile>::kStages>& ring,
                                                 int chunks, int group, int lane, bool,
                                                 float (&acc)[2][kColumns / 2]) {
    using L = Layout<Format, Tile>;
    using Mma = ptx::WgmmaFromRegisters<typename Format::Product, kColumns>;
    constexpr bool kParts = Format::Promote::kParts;
    StageReader<Format, Tile> stage{sh, ring, lane};
    const int thread = static_cast<int>(threadIdx.x) & 127;
    const std::uint32_t slab = static_cast<std::uint32_t>(L::kSplit ? 0 : group) *
                               static_cast<std::uint32_t>(L::slab_bytes(sh.codes));
    const std::uint32_t tokens = ptx::wgmma_tile(sh.tokens(0));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) acc[m][i] = 0;
    }
    for (int c = 0; c < chunks; ++c) {
      stage.wait();
      const std::uint32_t b = tokens + stage.offset();
      const std::uint32_t at = sh.weights(ring.slot) + slab;
      // d = or += the 64 rows of block m times the tokens. The last product of the stage is not
      // waited for.
      const auto multiply = [&](Decoder& decoder, int m, float(&d)[kColumns / 2], bool accumulate) {
        if constexpr (L::kVaries) {
          decoder.load(sh.codes, at, m, thread);
        } else {
          decoder.load(at, m, thread);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          std::uint32_t a[4];
          decoder.fragment(k, a);
          ptx::wgmma_fence();
          Mma::run(d, a, ptx::wgmma_descriptor(b + static_cast<std::uint32_t>(k) * ptx::kWgmmaStep),
                   accumulate || k > 0 ? 1 : 0);
          ptx::wgmma_commit();
          if (k < 3 || (m == 0 && !kParts)) ptx::wgmma_wait<2>();
        }
      };
      Decoder decoder[2];
      if constexpr (!kParts) {
        multiply(decoder[0], 0, acc[0], true);
        multiply(decoder[1], 1, acc[1], true);
        stage.peek();
        ptx::wgmma_wait<0>();
      } else {
        constexpr int kSets = kColumns <= 64 ? 2 : 1;  // accumulators of both blocks, or in turn
        float part[kSets][kColumns / 2];
        const auto promote = [&](const Decoder& of, float(&to)[kColumns / 2],
                                 const float(&from)[kColumns / 2]) {
#pragma unroll
          for (int i = 0; i < kColumns / 2; ++i) {
            to[i] = fmaf(from[i], of.scales.of_row[(i & 2) != 0 ? 1 : 0], to[i]);
          }
        };
        multiply(decoder[0], 0, part[0], false);
        if constexpr (kSets == 2) multiply(decoder[1], 1, part[1], false);
        ptx::wgmma_wait<0>();
        promote(decoder[0], acc[0], part[0]);
        if constexpr (kSets == 1) multiply(decoder[1], 1, part[0], false);
        stage.peek();
        ptx::wgmma_wait<0>();
        promote(decoder[1], acc[1], part[kSets - 1]);
      }
      stage.release(ring.slot);
      ring.advance();
    }
  }
};

}  // namespace moesaic::cuda
